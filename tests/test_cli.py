"""The `kvarn` command as a person meets it."""

import json
import os
import subprocess
import sys

import pytest

from kvarn import __version__
from kvarn.cache.strategy import NAMES
from kvarn.cli import main
from kvarn.cli.text import human_bytes


def kvarn(*args: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", "import sys; from kvarn.cli import main; sys.exit(main())", *args],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_strategies_prints_one_aligned_table(backend: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["strategies", "-c", "256", "-n", "200", "--backend", backend]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f" cells, {backend} backend,")
    header = next(i for i, line in enumerate(lines) if line.startswith("strategy"))
    table = lines[header:]
    assert len(table) == 1 + len(NAMES)
    assert len({len(line) for line in table}) == 1, "every line ends where the header does"
    for name, line in zip(NAMES, table[1:], strict=True):
        assert line.startswith(name)
        assert line.endswith("equal")


@pytest.mark.parametrize("codec", ["f32", "bf16", "int8"])
def test_strategies_as_json(codec: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["strategies", "-c", "256", "-n", "200", "--cache-type", codec, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    rows = said["rows"]
    assert said["backend"] == "cpu"
    assert len(rows) == len(NAMES)
    worst = {"f32": 2e-6, "bf16": 2e-2, "int8": 1e-1}[codec]
    for row in rows:
        assert row["same_bits"]
        assert 0 < row["max_difference"] < worst
        assert row["blocks_used"] <= row["blocks"]
    plain, repeated = rows[0], next(row for row in rows if row["strategy"] == "repeated")
    assert repeated["bytes_written_per_step"] == 3 * plain["bytes_written_per_step"]


BAD = {
    "too many tokens": (["-n", "600", "-c", "512"], "within the context of 512"),
    "heads that do not divide": (["--heads", "4/3"], "4 query heads cannot share 3 KV heads"),
    "heads that are no numbers": (["--heads", "many"], "give query heads / KV heads, as in 9/3"),
    "block size": (["--block-size", "24"], "it must be a power of two from 16"),
    "panel at 16": (["--cache-layout", "panel", "--block-size", "16"], "use block size 32 or more, or head-major"),
    "window": (["--window", "0"], "it must be at least 1"),
    "chunk": (["-b", "0"], "max_chunk is 0"),
    "context": (["-c", "-1", "-n", "20"], "within the context of -1"),
}


@pytest.mark.parametrize(("flags", "message"), BAD.values(), ids=BAD)
def test_bad_input_gets_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["strategies", *flags]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvarn: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_wrong_instruction_set_gets_one_line() -> None:
    result = kvarn("strategies", KVARN_ISA="mmx")
    assert result.returncode == 1
    assert result.stderr.startswith("kvarn: KVARN_ISA: instruction set 'mmx' does not run here; available: ")
    assert result.stderr.count("\n") == 1


def test_help_and_version_load_nothing_heavy() -> None:
    assert kvarn("--version").stdout == f"kvarn {__version__}\n"
    code = """
import sys
from kvarn.cli import main
try:
    main(["--help"])
except SystemExit:
    assert "numpy" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_importing_kvarn_does_not_import_torch() -> None:
    code = "import sys, kvarn.cache.cache; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_reader_that_goes_away_is_no_error() -> None:
    ours = f"{sys.executable} -c 'import sys; from kvarn.cli import main; sys.exit(main())' strategies -c 64 -n 40"
    result = subprocess.run(["sh", "-c", f"{ours} | head -c 1"], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("n", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (44 << 20, "44.0 MiB")])
def test_human_bytes(n: int, text: str) -> None:
    assert human_bytes(n) == text
