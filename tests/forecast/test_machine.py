"""Figures of a machine are measured once, kept, and measured again when they are old, damaged or of another machine."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.tiny_gguf import write

from kvarn.backends.cache_settings import cache_config
from kvarn.backends.cpu import Cpu, trials
from kvarn.backends.pool import make_pool
from kvarn.forecast import engine_trial, machine
from kvarn.forecast.outlined import Outlined
from kvarn.loading.checkpoint import open_checkpoint


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The trials that were run; they take no time and give 1, 2, 3, ... us."""
    names: list[str] = []

    def instead(name: str, n: int = 1) -> Callable[..., object]:
        def trial(*arguments: object) -> object:
            names.append(name)
            return 1e-6 * len(names) if n == 1 else (1e-6, 2e-6)

        return trial

    for name in ("read_memory", "read_product", "multiply", "small_product", "attend_many"):
        monkeypatch.setattr(trials, name, instead(name))
    monkeypatch.setattr(trials, "decode_attention", instead("decode_attention", 2))
    for name in ("step_seconds", "logit_seconds"):
        monkeypatch.setattr(engine_trial, name, instead(name))
    return names


@pytest.fixture
def rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[str]) -> Callable[..., object]:
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path / "cache"))
    model = Outlined.of_headers(open_checkpoint(write(tmp_path / "tiny.gguf", "llama")), Cpu(), 32, process=0)

    def ask(threads: int = 1, codec: str = "bf16", **settings: object) -> object:
        planned = model.plan(cache_config(model.config, "tiny", context=64, cache_type=codec))
        return machine.rates_of(Cpu(make_pool(threads)), model.work, planned, **settings)

    return ask


def test_figures_are_kept(rates: Callable[..., object], measured: list[str], tmp_path: Path) -> None:
    first = rates()
    n = len(measured)
    assert n > 5
    assert rates() == first
    assert len(measured) == n, "nothing was measured twice"
    rates(codec="int8")
    assert measured[n:] == ["decode_attention", "attend_many"], "only what is new"
    assert rates() == first
    rates(fresh=True)
    assert len(measured) == n + 2 + n
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["machine.json"], "no temporary file is left"


def test_other_threads_are_another_machine(rates: Callable[..., object], measured: list[str]) -> None:
    rates()
    n = len(measured)
    rates(threads=2)
    assert len(measured) == 2 * n
    rates()
    assert len(measured) == 2 * n


DAMAGE = {
    "no JSON": lambda text: "{",
    "a list": lambda text: "[]",
    "another version": lambda text: text.replace('"kvarn": "', '"kvarn": "9'),
    "old": lambda text: _changed(text, lambda entry: [entry[0], entry[1] - machine.KEPT - 1]),
    "from the future": lambda text: _changed(text, lambda entry: [entry[0], entry[1] + 1e6]),
    "negative": lambda text: _changed(text, lambda entry: [-1.0, entry[1]]),
    "text": lambda text: _changed(text, lambda entry: ["fast", entry[1]]),
    "infinite": lambda text: _changed(text, lambda entry: [1e999, entry[1]]),
}


def _changed(text: str, change: Callable[[list], list]) -> str:
    facts = json.loads(text)
    for figures in facts["machines"].values():
        figures.update({name: change(entry) for name, entry in figures.items()})
    return json.dumps(facts)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_cannot_be_used_is_measured_again(
    rates: Callable[..., object], measured: list[str], tmp_path: Path, damage: Callable[[str], str]
) -> None:
    rates()
    n, kept = len(measured), tmp_path / "cache" / "machine.json"
    kept.write_text(damage(kept.read_text()))
    rates()
    assert len(measured) == 2 * n
    rates()
    assert len(measured) == 2 * n


def test_a_folder_that_cannot_be_written_is_no_error(
    rates: Callable[..., object], measured: list[str], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    rates()
    n = len(measured)
    rates()
    assert len(measured) == 2 * n
