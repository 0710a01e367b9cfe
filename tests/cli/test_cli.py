"""The `kvarn` command: tables, errors in one line, pipes and terminals."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.harness import RUNNABLE
from support.serving import tiny_model

from kvarn import __version__
from kvarn.cache.codec import CODECS
from kvarn.cache.strategy import NAMES
from kvarn.cli import main
from kvarn.cli.table import human_bytes


def kvarn(*args: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", "import sys; from kvarn.cli import main; sys.exit(main())", *args],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("backend", RUNNABLE)
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


@pytest.mark.parametrize("codec", CODECS)
def test_strategies_as_json(codec: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["strategies", "-c", "256", "-n", "200", "--cache-type", codec, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    rows = said["rows"]
    assert said["backend"] == "cpu"
    assert len(rows) == len(NAMES)
    worst = {"f32": 2e-6, "f16": 2e-3, "bf16": 2e-2, "int4": 0.3}.get(codec, 1e-1)
    for row in rows:
        assert row["same_bits"]
        assert 0 < row["max_difference"] < worst
        assert row["blocks_used"] <= row["blocks"]
    plain, repeated = rows[0], next(row for row in rows if row["strategy"] == "repeated")
    assert repeated["bytes_written_per_step"] == 3 * plain["bytes_written_per_step"]


BAD = {
    "too many tokens": (["-n", "600", "-c", "512"], "within the context of 512"),
    "heads that do not divide": (["--heads", "4/3"], "4 query heads cannot share 3 KV heads"),
    "block size": (["--block-size", "24"], "it must be a power of two from 16"),
    "panel at 16": (["--cache-layout", "panel", "--block-size", "16"], "use block size 32 or more, or head-major"),
    "window": (["--window", "0"], "it must be at least 1"),
    "chunk": (["-b", "0"], "max_chunk is 0"),
    "context": (["-c", "-1", "-n", "20"], "within the context of -1"),
}


@pytest.mark.requirement(39)
@pytest.mark.parametrize(("flags", "message"), BAD.values(), ids=BAD)
def test_bad_input_gets_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["strategies", *flags]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvarn strategies: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_wrong_instruction_set_gets_one_line() -> None:
    result = kvarn("strategies", KVARN_ISA="mmx")
    assert result.returncode == 1
    assert result.stderr.startswith("kvarn strategies: KVARN_ISA: instruction set 'mmx' does not run here; available: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [[], ["--help"], ["help"], ["explain", "--help"], ["help", "pull"]], ids=" ".join)
def test_what_needs_no_model_loads_nothing_heavy(command: list[str]) -> None:
    assert kvarn("--version").stdout == f"kvarn {__version__}\n"
    code = f"""
import sys
from kvarn.cli import main
assert main({command}) == 0
assert not {{"numpy", "kvarn.llm"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: kvarn ")


def test_importing_kvarn_does_not_import_torch() -> None:
    code = "import sys, kvarn.cache.cache; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_closed_output_pipe_is_not_an_error() -> None:
    ours = f"{sys.executable} -c 'import sys; from kvarn.cli import main; sys.exit(main())' strategies -c 64 -n 40"
    result = subprocess.run(["sh", "-c", f"{ours} | head -c 1"], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("n", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (44 << 20, "44.0 MiB")])
def test_human_bytes(n: int, text: str) -> None:
    assert human_bytes(n) == text


COMMAND = [sys.executable, "-c", "import sys; from kvarn.cli import main; sys.exit(main())"]


def in_shell(line: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a command line in a shell, as a user types it."""
    typed = line.replace("kvarn ", shlex.join(COMMAND) + " ", 1)
    return subprocess.run(["sh", "-c", typed], capture_output=True, env=os.environ | environment, timeout=60)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 512)


LINES = {  # what is typed, the status, what it says on standard error
    "no standard error": ("kvarn run -m M -p abc -n 2 2>&-", 0, ""),
    "no standard input": ("kvarn run -m M -p - -n 2 <&-", 1, "the prompt is empty"),
    "chat without input": ("kvarn chat -m M <&-", 0, ""),
    "no standard output": ("kvarn run -m M -p abc -n 2 >&-", 1, "standard output is closed, so the result would be"),
    "a list for nobody": ("kvarn list >&-", 1, "standard output is closed, so the result would be lost"),
    "a full disk": ("kvarn run -m M -p abc -n 2 >/dev/full", 1, "output: No space left on device"),
    "rubbish": ("printf '\\377' | kvarn run -m M -p -", 1, "standard input is not UTF-8 text (byte 0)"),
    "nothing": ("kvarn run M </dev/null", 2, "give a prompt: kvarn run"),
    "no place": ("kvarn run -m M -p abc --trace /nowhere/x", 1, "/nowhere/x: No such file or directory"),
    "no tokens": ("kvarn run -m M -p abc -n 0", 1, "-n is 0; it must be at least 1, or -1"),
    "no step": ("kvarn run -m M -p abc -b 0", 1, "-b is 0; it must be at least 1"),
    "no sequences": ("kvarn run -m M -p abc -np 0", 1, "-np is 0; it must be at least 1"),
    "no window to run with": ("kvarn run -m M -p abc --window 0", 1, "--window is 0; it must be at least 1"),
    "no window": ("kvarn inspect M --window 0", 1, "--window is 0; it must be at least 1"),
    "less than no context": ("kvarn inspect M -c -1", 1, "-c is -1; it must be at least 0"),
    "a port that is none": ("kvarn serve -m M --port 99999", 1, "--port is 99999; it must be between 0"),
    "no end": ("kvarn serve -m M --drain-seconds inf", 1, "--drain-seconds is inf; give a number of seconds"),
    "more than memory": ("kvarn run -m M -p a --cache paged --cache-bytes 9000000G", 1, "GiB of memory: lower"),
    "no such model": ("kvarn run -m nosuch -p a", 1, "there is no model 'nosuch'; `kvarn list --all` shows"),
}


@pytest.mark.parametrize(("line", "status", "error"), LINES.values(), ids=LINES)
def test_command_lines_in_a_shell(tiny: Path, line: str, status: int, error: str) -> None:
    done = in_shell(line.replace(" M", f" {tiny}"))
    error_text = done.stderr.decode()
    assert (done.returncode, error in error_text) == (status, True), error_text
    assert error_text.count("\n") <= 1
    assert not status or error_text.startswith(" ".join(("kvarn", line.split("kvarn ")[1].split()[0])) + ": ")


def test_a_terminal_that_cannot_encode_every_character(tiny: Path) -> None:
    done = in_shell(f"kvarn run -m {tiny} -p '日本語で' -n 40 --seed 3 --temp 1.5 --json", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"]
    assert in_shell(f"kvarn run -m {tiny} -p abc -n 40 --seed 3 --temp 1.5", PYTHONIOENCODING="ascii").returncode == 0


def test_prompts_through_a_pipe_and_answers_until_the_context_is_full(tiny: Path) -> None:
    done = in_shell(f"printf abcdef | kvarn run {tiny} -c 64 -n -1 --ignore-eos --json")
    error_text = json.loads(done.stdout)
    assert (error_text["finish_reason"], error_text["prompt_tokens"] + len(error_text["tokens"])) == ("length", 64)
    whole = json.loads(in_shell(f"kvarn inspect {tiny} -c 0 --json").stdout)
    assert whole["context"] == whole["trained_context"] == 512
    done = in_shell(f"kvarn run -m {tiny} -p abc -c 0 -n -1 --ignore-eos --json")
    assert len(json.loads(done.stdout)["tokens"]) > 500


@pytest.mark.parametrize(("flags", "message"), [(["-c", "2"], "at least 3"), (["--chunks", "-1"], "--chunks is -1")])
def test_perplexity_of_an_empty_text(tiny: Path, tmp_path: Path, flags: list[str], message: str, capsys) -> None:
    (tmp_path / "text").write_text("abcdefgh" * 40)
    assert main(["perplexity", "-m", str(tiny), "-f", str(tmp_path / "text"), *flags]) == 1
    assert message in capsys.readouterr().err


def test_the_package_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "kvarn", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"kvarn {__version__}\n")
