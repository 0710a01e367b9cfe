"""Snapshots on the command line: made, inspected, used; answers and conversations that go on."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.serving import tiny_model

from kvarn.cli import main
from kvarn.lasting.snapshot import SnapshotFile


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 512)


@pytest.fixture
def kvarn(model: Path, capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def call(command: str, *words: str, given: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        needs = [] if command.endswith("inspect") else ["-m", str(model), "-t", "1"]
        status = main([*command.split(), *words, *needs])
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


DRAWN = ("--temp", "0.9", "--seed", "5", "--ignore-eos")


def test_an_answer_goes_on_where_it_stopped(kvarn) -> None:
    _, whole, _ = kvarn("run", "-p", "hello there", "-n", "20", *DRAWN)
    status, begun, _ = kvarn("run", "-p", "hello there", "-n", "8", *DRAWN, "--save-snapshot", "a.kvs")
    assert status == 0
    status, rest, told = kvarn("run", "--snapshot", "a.kvs", "-n", "12", "--cache", "contiguous")
    assert status == 0
    assert begun.rstrip("\n") + rest == whole
    assert "from snapshot a.kvs, read in" in told
    assert "stopped by -n 12" in told
    _, shown, _ = kvarn("snapshot inspect", "a.kvs")
    assert "answer  8 tokens so far, seed 5" in shown


def test_a_warmed_text_is_not_computed_again(kvarn) -> None:
    text = "a long text that is computed once " * 4
    assert kvarn("snapshot make", "-p", text, "-o", "a.kvs")[0] == 0
    _, plain, _ = kvarn("run", "-p", text + "and", "-n", "5")
    _, warm, told = kvarn("run", "-p", text + "and", "-n", "5", "--snapshot", "a.kvs", "--cache", "ring")
    assert warm == plain
    with SnapshotFile("a.kvs") as file:
        n = file.facts.n_tokens
    assert f"{n} reused ({n} from snapshot a.kvs" in told
    assert "computed again and are equal, bit by bit" in kvarn("snapshot verify", "a.kvs", "--tokens", "4")[1]
    assert kvarn("snapshot make", "--system", "be nice", "-o", "s.kvs")[0] == 0
    _, _, told = kvarn("run", "--system", "be nice", "-p", "hello", "-n", "2", "--snapshot", "s.kvs")
    assert "from snapshot s.kvs" in told


@pytest.mark.parametrize(
    ("command", "words", "reason"),
    [
        ("run", ("-p", "x", "--snapshot", "none.kvs"), "No such file"),
        ("run", ("--snapshot", "a.kvs"), "no answer that could go on"),
        ("run", ("-p", "x", "--snapshot", "a.kvs", "--cache-type", "int8"), "cache type bf16, and here it is int8"),
        ("run", ("-p", "x", "--snapshot", "junk.kvs"), "no snapshot of kvarn"),
        ("run", ("-p", "x", "-n", "1", "--save-snapshot", "nowhere/a.kvs"), "cannot be written: No such file"),
        ("snapshot inspect", ("junk.kvs",), "no snapshot of kvarn"),
        ("snapshot verify", ("a.kvs", "--tokens", "0"), "at least 1"),
        ("snapshot verify", ("a.kvs", "--cache-type", "f32"), "cache type bf16, and here it is f32"),
        ("snapshot make", ("-p", "x", "-o", "nowhere/a.kvs"), "cannot be written"),
        ("chat", ("--session", "junk.kvs"), "no snapshot of kvarn"),
        ("chat", ("--session", "a.kvs"), "has no conversation"),
        ("chat", ("--session", "nowhere/s.kvs"), "there is no folder"),
        ("snapshot", (), "needs one more word"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(kvarn, command: str, words: tuple[str, ...], reason: str) -> None:
    kvarn("snapshot make", "-p", "hello", "-o", "a.kvs")
    Path("junk.kvs").write_bytes(b"junk" * 100)
    status, _, told = kvarn(command, *words)
    assert status in (1, 2)
    assert reason in told.splitlines()[-1]
    assert "Traceback" not in told
    assert Path("junk.kvs").read_bytes() == b"junk" * 100  # never replaced


def test_a_conversation_goes_on_tomorrow(kvarn) -> None:
    flags = ("--session", "s.kvs", "-n", "6")
    _, whole, _ = kvarn("chat", "-n", "6", *DRAWN, given="hello\nand now?\nthe end\n")
    _, first, told = kvarn("chat", *flags, *DRAWN, given="hello\n")
    assert "a new session" in told
    assert "kept 1 turn" in told
    _, second, told = kvarn("chat", *flags, "--ignore-eos", given="and now?\n")  # seed and temperature are in the file
    assert "1 turn from s.kvs: " in told
    _, third, told = kvarn("chat", *flags, "--ignore-eos", "--cache-type", "int8", given="/set\n/explain\n")
    assert "computed again: s.kvs cannot be used here: it was made with the cache type bf16" in told
    assert "seed                5" in third
    assert first + second == whole[: len(first + second)]
    _, last, _ = kvarn("chat", *flags, "--ignore-eos", "--cache", "contiguous", given="the end\n")
    assert first + second + last == whole


def test_a_session_is_kept_when_its_terminal_is_closed(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvarn", "chat", "-m", str(model), "--session", str(tmp_path / "s.kvs"), "-n", "4"]
    environment = os.environ | {"KVARN_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
    process.stdin.write("hello\n")
    process.stdin.flush()
    assert process.stdout.readline()  # the answer
    process.send_signal(signal.SIGHUP)
    process.communicate()
    assert process.returncode == 128 + signal.SIGHUP
    with SnapshotFile(tmp_path / "s.kvs") as file:
        assert file.chat()["messages"][0] == {"role": "user", "content": "hello"}
