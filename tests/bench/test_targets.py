"""Speed targets: what is made of a run's figures, without measuring any."""

import pytest

from kvarn.bench.targets import AVX512, RUNS, TARGETS, Target, aim, command, verdicts


def row(test: str, depth: int, tok_s: float, cache_type: str = "bf16") -> dict:
    return {"test": test, "depth": depth, "cache_type": cache_type, "tok_s": tok_s}


@pytest.mark.parametrize("target", TARGETS, ids=[target.what for target in TARGETS])
def test_every_target_names_a_row_of_its_run(target: Target) -> None:
    words = next(run for run in RUNS if run.name == target.run).flags.split()
    kind, n = target.test[:2], target.test[2:]
    assert words[words.index("-p" if kind == "pp" else "-n") + 1] == n
    assert str(target.depth) in words[words.index("-d") + 1].split(",")


@pytest.mark.requirement(31)
def test_a_figure_and_a_ratio_pass_or_fail_on_their_own() -> None:
    target = Target("decode @ 0", "start", "tg64", 400, 2)
    peer = {"ratio": 1.5, "tok_s": 250, "setting": "bf16 no flash"}
    result = {"rows": [row("pp512", 0, 900), row("tg64", 0, 500) | {"against": peer}]}
    assert verdicts(target, result) == [
        ["decode @ 0", "400 tok/s", "500 tok/s", "pass"],
        ["decode @ 0, against bf16 no flash", "2x", "1.50x of 250", "FAIL"],
    ]
    alone = {"rows": [row("tg64", 0, 399)]}
    assert [line[3] for line in verdicts(target, alone)] == ["FAIL", "-"]
    assert verdicts(target, {"error": "kvarn: no such file"})[0][3] == "kvarn: no such file"


def test_int8_is_expected_to_be_faster_than_bf16() -> None:
    result = {"rows": [row("tg64", 4200, 170), row("tg64", 4200, 210, "int8")]}
    assert aim(result)[-1] == "reached"
    slower = {"rows": [row("tg64", 4200, 170), row("tg64", 4200, 160, "int8")]}
    assert aim(slower)[-1] == "not reached"


def test_without_a_peer_the_command_names_none() -> None:
    assert "--against" not in command(RUNS[0], 3, {})
    assert command(RUNS[0], 3, {AVX512: "/somewhere/python"})[-2:] == ["--against-python", "/somewhere/python"]
