"""Caches that read one text in lockstep: lossless choices are equal in every bit, others are measured."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.serving import tiny_model

from kvarn.comparison.candidate import Candidate, allocate, control_of, setups
from kvarn.comparison.divergence import Base, Track
from kvarn.comparison.lockstep import lockstep
from kvarn.comparison.report import Report, report
from kvarn.comparison.speed import cases, speeds
from kvarn.engine import scoring
from kvarn.engine.scoring import perplexity, score, windows
from kvarn.errors import KvarnError, OutOfMemory
from kvarn.llm import LLM

CONTEXT, CHUNK = 96, 40
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 5


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    model = tiny_model(tmp_path_factory.mktemp("model"))
    return LLM(model, cache="contiguous", cache_type="int8", context=CONTEXT, max_seqs=1, threads=1, backend="cpu")


def tokens_of(llm: LLM) -> list[int]:
    return llm.tokenizer.encode(TEXT)


def compared(
    llm: LLM, caches: Sequence[str], types: Sequence[str], sizes: Sequence[int] = (), n: int = 0
) -> tuple[list[Candidate], Report]:
    candidates = allocate(llm, setups(caches, types, sizes, None, CHUNK), CONTEXT)
    cut = windows(tokens_of(llm), CONTEXT, 2, None)
    positions = lockstep(llm.program, candidates, cut, CHUNK)
    found = speeds(llm, candidates, tokens_of(llm), cases(None, n, CONTEXT), 1)
    return candidates, report(candidates, positions, CONTEXT, found)


EXACT = ("contiguous", "head-major", "repeated", "ring", "sliding", "sinks", "paged", "auto")


def test_every_strategy_with_f32_cells_is_lossless_and_shows_exactly_0(llm: LLM) -> None:
    candidates, found = compared(llm, EXACT, ["f32"])
    assert len(found.rows) == 1 + 1 + len(EXACT) - 1, "the base, the control, and the others once"
    for row in found.rows:
        if row.setup.cache_type == "f32":
            assert (row.verdict, row.equal, row.positions) == ("lossless", 2 * CONTEXT, 2 * CONTEXT)
            assert set(row.whole.kld) == set(row.whole.delta_p) == {0.0}
            assert row.whole.same_top == (1.0, 0.0)
    for each in candidates:
        each.cache.check()
        assert each.cache.usage().sequences == 0


def test_twins_have_the_same_bits_with_every_number_type(llm: LLM) -> None:
    _, found = compared(llm, ["paged", "ring", "sliding"], ["bf16", "int8"], [32])
    rows = {row.name: row for row in found.rows}
    assert rows["sliding int8 window 32"].twin == "ring int8 window 32"
    assert rows["sliding bf16 window 32"].equal_to_twin == 2 * CONTEXT
    assert rows["sliding int8 window 32"].equal_to_twin == 2 * CONTEXT
    assert rows["paged int8"].twin is None
    assert rows["paged int8"].equal < 2 * CONTEXT
    assert rows["ring int8 window 32"].whole.kld.mean > rows["paged int8"].whole.kld.mean > 0


def test_lockstep_is_reading_one_after_the_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the steps are."""
    base, *_, int8 = allocate(llm, setups(["paged"], ["int8"], [], None, CHUNK), CONTEXT)
    track = Track()
    for text, targets in windows(tokens_of(llm), CONTEXT, 2, None):
        whole = [score(llm.program, each.memory, each.cache, text, 0, CHUNK) for each in (base, int8)]
        track.add(Base(whole[0], targets), 0, whole[1])
    for nbytes in (scoring.STEP_BYTES, 1, 5 * 4 * llm.config.vocab_size):
        monkeypatch.setattr(scoring, "STEP_BYTES", nbytes)
        candidates, _ = compared(llm, ["paged"], ["int8"])
        assert candidates[-1].track == track


def test_perplexity_is_that_of_the_perplexity_command(llm: LLM) -> None:
    candidates, found = compared(llm, ["paged"], ["int8"])
    last = candidates[-1]
    alone = perplexity(llm.program, last.memory, last.cache, tokens_of(llm), CONTEXT, 2, None, CHUNK)
    assert found.rows[-1].whole.ppl == (alone.ppl, alone.error)
    assert found.rows[-1].whole.positions == alone.tokens == 2 * (CONTEXT // 2 - 1)


def test_the_control_is_the_f16_row_that_was_asked_for_or_an_own_one(llm: LLM) -> None:
    names = [[row.name for row in compared(llm, ["paged"], types)[1].rows] for types in (["f16"], ["int8"])]
    assert names == [["contiguous f32", "paged f16"], ["contiguous f32", "contiguous f16", "paged int8"]]
    candidates, found = compared(llm, ["sinks"], ["f16"], [16])
    assert control_of(candidates).name == "contiguous f16"
    assert found.rows[1].verdict == "noise"


def test_speeds_at_each_depth_and_the_first_greedy_token_that_differs(llm: LLM) -> None:
    _, found = compared(llm, ["paged", "sinks"], ["f32"], [16], n=8)
    base, control, paged, sinks = found.rows
    for row in found.rows:
        assert [speed.depth for speed in row.speeds] == [0, CONTEXT // 2, CONTEXT - 8 - 2]
        assert all(speed.figure.tok_s > 0 and speed.generated == 8 for speed in row.speeds)
    assert {speed.first_different for row in (base, paged) for speed in row.speeds} == {None}
    assert control.speeds[0].first_different is None
    assert sinks.speeds[0].first_different is None, "the window is not full"
    assert any(speed.first_different is not None for speed in sinks.speeds[1:])


def test_bands_are_those_that_windows_reach_and_count_every_prediction(llm: LLM) -> None:
    row = compared(llm, ["paged"], ["int8"])[1].rows[-1]
    assert list(row.bands) == ["0-1k"]
    assert row.bands["0-1k"].positions == 2 * (CONTEXT - 1)


def test_an_error_in_the_middle_leaves_no_sequence_open(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = allocate(llm, setups(["paged"], ["int8"], [], None, CHUNK), CONTEXT)
    cut = windows(tokens_of(llm), CONTEXT, 1, None)

    def interrupt(what: str, done: int, total: int | None) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lockstep(llm.program, candidates, cut, CHUNK, interrupt)
    assert [each.cache.usage().sequences for each in candidates] == [0, 0, 0]


def test_caches_that_do_not_fit_together_are_refused_before_they_are_allocated(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = setups(["paged"], ["int8"], [], None, CHUNK)
    monkeypatch.setattr(type(llm.backend), "memory_bytes", 1000)
    with pytest.raises(OutOfMemory, match=r"3 caches would take .* GiB together and this machine has"):
        allocate(llm, wanted, CONTEXT)


@pytest.mark.parametrize(("depths", "n"), [([90], 8), (None, 95), (None, 1000)])
def test_depths_outside_of_the_window_are_refused(depths: list[int] | None, n: int) -> None:
    with pytest.raises(KvarnError, match="-c"):
        cases(depths, n, CONTEXT)


def test_steps_hold_no_more_logits_than_they_may(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "STEP_BYTES", 7 * 4 * llm.config.vocab_size)
    (window,) = windows(tokens_of(llm), CONTEXT, 1, None)
    found = list(scoring.read(llm.program, llm.memory, llm.cache, window.tokens, 50, CHUNK))
    assert [start for start, _ in found] == list(range(50, CONTEXT, 7))
    assert max(len(rows) for _, rows in found) == 7
    whole = score(llm.program, llm.memory, llm.cache, window.tokens, 50, CHUNK)
    assert np.concatenate([rows for _, rows in found]).tobytes() == whole.tobytes()


def test_windows_of_a_text_with_and_without_bos() -> None:
    assert windows(range(10), 4, None, None) == [([0, 1, 2, 3], [1, 2, 3]), ([4, 5, 6, 7], [5, 6, 7])]
    assert windows(range(10), 4, 1, 99) == [([99, 1, 2, 3], [1, 2, 3])]


def test_a_plot_is_written_beside_the_table(tmp_path: Path, llm: LLM, capsys: pytest.CaptureFixture) -> None:
    from kvarn.cli import main

    text = tmp_path / "text"
    text.write_text(TEXT)
    picture = tmp_path / "a.svg"
    line = f"compare {llm.path} -f {text} -c 96 --windows 2 -n 4 -r 1 -t 1 --details --plot {picture}"
    assert main(line.split()) == 0
    said = capsys.readouterr().out
    assert "paged f32       lossless: equal at 192 of 192 positions; 100 % memory" in said
    assert "The thresholds are kvarn's own:" in said
    assert picture.read_text().startswith("<svg ")
