"""The scripts under bench/ that judge: what they make of figures, without measuring any."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvarn.bench.machine import Bandwidth

BENCH = Path(__file__).parents[2] / "bench"


def script(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(BENCH / name)))


def row(test: str, depth: int, tok_s: float, cache_type: str = "bf16") -> dict:
    return {"test": test, "depth": depth, "cache_type": cache_type, "tok_s": tok_s}


def test_every_target_names_a_row_of_its_run() -> None:
    targets = script("targets.py")
    runs = {run.name: run for run in targets.RUNS}
    for target in targets.TARGETS:
        words = runs[target.run].flags.split()
        kind, n = target.test[:2], target.test[2:]
        assert words[words.index("-p" if kind == "pp" else "-n") + 1] == n
        assert str(target.depth) in words[words.index("-d") + 1].split(",")


def test_verdicts() -> None:
    targets = script("targets.py")
    target = targets.Target("decode @ 0", "start", "tg64", 400, 2)
    peer = {"ratio": 1.5, "tok_s": 250, "setting": "bf16 no flash"}
    result = {"rows": [row("pp512", 0, 900), row("tg64", 0, 500) | {"against": peer}]}
    assert targets.verdicts(target, result) == [
        ["decode @ 0", "400 tok/s", "500 tok/s", "pass"],
        ["decode @ 0, against bf16 no flash", "2x", "1.50x of 250", "FAIL"],
    ]
    alone = {"rows": [row("tg64", 0, 399)]}
    assert [line[3] for line in targets.verdicts(target, alone)] == ["FAIL", "-"]
    assert targets.verdicts(target, {"error": "kvarn: no such file"})[0][3] == "kvarn: no such file"


def test_the_aim_for_int8() -> None:
    targets = script("targets.py")
    result = {"rows": [row("tg64", 4200, 170), row("tg64", 4200, 210, "int8")]}
    assert targets.aim(result)[-1] == "reached"


def test_a_run_without_its_peer_is_a_plain_command(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = script("targets.py")
    monkeypatch.delenv("KVARN_PEER_PYTHON", raising=False)
    assert "--against" not in targets.command(targets.RUNS[0], 3)
    monkeypatch.setenv("KVARN_PEER_PYTHON", "/somewhere/python")
    assert targets.command(targets.RUNS[0], 3)[-2:] == ["--against-python", "/somewhere/python"]


def test_the_line_is_found() -> None:
    flatness = script("flatness.py")
    points = [
        {"bytes_per_token": 1e8 + 2e4 * depth, "ms_per_token": 1.0 + (1e8 + 2e4 * depth) / 20e6, "python_share": 0.02}
        for depth in (0, 1000, 4000, 8000)
    ]
    bandwidth = Bandwidth(1)
    bandwidth.at = lambda nbytes: 20.0  # type: ignore[method-assign]
    line = flatness.fit(points, bandwidth, layers=10, heads=8)
    assert line["slope_gb_s"] == pytest.approx(20)
    assert line["intercept_ms"] == pytest.approx(1)
    assert line["r_squared"] == pytest.approx(1)
    assert line["growth_over_bandwidth"] == pytest.approx(1)
    assert line["attention_us_per_layer_and_head_at_deepest"] == pytest.approx(8000 / 80)
