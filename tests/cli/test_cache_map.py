"""`--map`: the cache's blocks below an answer, drawn without disturbing it."""

import os
from pathlib import Path

import pyte
import pytest
from support.serving import tiny_model

from kvarn import LLM, SamplingParams
from kvarn.cli import main
from kvarn.cli.cache_map import CLEAR, INTERVAL, MOST_ROWS, Below, Map
from kvarn.cli.chat.live import LiveRows

SIZE = os.terminal_size((40, 8))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 256)


class Terminal:
    def __init__(self) -> None:
        self.screen = pyte.HistoryScreen(SIZE.columns, SIZE.lines, history=1000)
        self._stream = pyte.Stream(self.screen)

    def feed(self, text: str) -> None:
        self._stream.feed(text.replace("\n", "\r\n"))  # as the system's line discipline does

    @property
    def rows(self) -> list[str]:
        above = ["".join(line[x].data for x in range(SIZE.columns)) for line in self.screen.history.top]
        return [row.rstrip() for row in [*above, *self.screen.display]]


def test_text_is_the_same_with_the_map_below_it_also_when_the_screen_scrolls() -> None:
    text = "one two three four five six seven eight nine ten eleven twelve\n" * 6 + "the end"
    drawn, plain, clock = Terminal(), Terminal(), iter(range(10_000))
    below = Below(lambda columns: ["map", "#" * (columns - 1)], lambda: SIZE, lambda: next(clock))
    with_map, without = LiveRows(lambda: SIZE), LiveRows(lambda: SIZE)
    for start in range(0, len(text), 5):
        piece = text[start : start + 5]
        drawn.feed(CLEAR + with_map.add(piece) + below.draw())
        plain.feed(without.add(piece))
        shown = [row for row in drawn.rows if row]
        assert shown[-2:] == ["map", "#" * 39]
        assert shown[:-2] == [row for row in plain.rows if row]
    drawn.feed(CLEAR + with_map.leave() + below.leave())
    assert [row for row in drawn.rows if row][-3:] == [plain_last(plain), "map", "#" * 39]


def plain_last(terminal: Terminal) -> str:
    return [row for row in terminal.rows if row][-1]


def test_the_map_is_computed_ten_times_a_second_at_most() -> None:
    now, looks = [0.0], []
    below = Below(lambda columns: looks.append(columns) or ["row"], lambda: SIZE, lambda: now[0])
    for _ in range(5):
        assert "row" in below.draw()
    assert len(looks) == 1
    now[0] += INTERVAL
    below.draw()
    assert len(looks) == 2


def test_a_screen_that_is_too_small_has_no_map() -> None:
    below = Below(lambda columns: ["row"] * 7, lambda: SIZE)
    assert below.draw() == ""


def test_the_signs_of_blocks(model: Path) -> None:
    with LLM(model, cache="paged", block_size=16) as llm:
        text = "a text that is long enough to fill some blocks of the cache, and more"
        first = llm.start(text, SamplingParams(max_tokens=4, ignore_eos=True))
        llm.runner.wait(first)
        second = llm.start(text, SamplingParams(max_tokens=40, ignore_eos=True))
        llm.runner.advance(lambda: second.request.samples[0].n_output >= 20)
        head, *cells = Map(llm, second).rows(80)
        plain = "".join(Map(llm, second, unicode=False).rows(80)[1:])
        n_blocks = llm.cache.plan.n_blocks
        full, kept = divmod(second.request.adoption.reused, 16)[0], llm.cache.map()[0].cached
        assert "".join(cells).count("▒") == plain.count("=") == full > 1
        assert "".join(cells).count("░") == plain.count("-") == len(kept)
        assert sum(map(len, cells)) == n_blocks
        assert f"{n_blocks - plain.count('.'):,} of {n_blocks:,} blocks" in head
        assert "█ computed" in head
        narrow = Map(llm, second).rows(12)
        assert len(narrow) <= MOST_ROWS + 1
        assert all(len(row) < 12 for row in narrow)
        llm.runner.cancel(second)


def test_without_a_terminal_one_line_says_so(model: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["run", "-m", str(model), "-p", "hello", "-n", "3", "--map"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("--map draws on a terminal") == 1
    assert "\x1b" not in shown.out + shown.err
    assert main(["run", "-m", str(model), "-p", "hello", "--map", "--json"]) == 2
