"""Where the prompt of `kvarn run` comes from, what `--chat` changes, and when `run` is a chat."""

import io
import json
import os
import sys
from pathlib import Path

import pytest
from support.serving import tiny_model
from support.terminal import CTRL_D, terminal

from kvarn.cli import flags, main, parser_of
from kvarn.cli.parser import UsageError
from kvarn.cli.prompt import read_prompt


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 512)


def prompt_of(*words: str) -> str:
    args = parser_of("run").parse(words)
    assert args is not None
    return read_prompt(args)


def test_a_pipe_or_a_file_follows_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"from a pipe\n")
    os.close(writer)
    (tmp_path / "text").write_text("from a file\n")
    (tmp_path / "empty").touch()
    (tmp_path / "blank").write_text(" \n")
    for opened, words, expected in (
        (os.fdopen(reader), ["Sum up:"], "Sum up:\n\nfrom a pipe\n"),
        ((tmp_path / "text").open(), ["Sum up:"], "Sum up:\n\nfrom a file\n"),
        ((tmp_path / "text").open(), ["-p", "Sum up:"], "Sum up:"),
        ((tmp_path / "text").open(), ["-p", "-"], "from a file\n"),
        ((tmp_path / "text").open(), ["-f", "-"], "from a file\n"),
        ((tmp_path / "text").open(), [""], "from a file\n"),
        ((tmp_path / "text").open(), ["smollm2"], "from a file\n"),
        ((tmp_path / "text").open(), ["-f", str(tmp_path / "text")], "from a file\n"),
        ((tmp_path / "blank").open(), ["Sum up:"], "Sum up:"),
        ((tmp_path / "empty").open(), ["Sum up:"], "Sum up:"),
        (Path("/dev/null").open(), ["Sum up:"], "Sum up:"),  # noqa: SIM115 (closed below)
        (io.StringIO("no file"), ["Sum up:"], "Sum up:"),
    ):
        with opened:
            monkeypatch.setattr(sys, "stdin", opened)
            assert prompt_of(*words) == expected


def test_a_pipe_that_sends_nothing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("kvarn.cli.prompt.select", lambda *waits: ([], [], []))
    reader, writer = os.pipe()
    os.close(writer)
    with os.fdopen(reader) as opened:
        monkeypatch.setattr(sys, "stdin", opened)
        assert prompt_of("Sum up:") == "Sum up:"
    assert capsys.readouterr().err == "reading standard input, which follows the prompt; < /dev/null skips it\n"


def test_a_system_message_implies_the_template(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    lengths = []
    for words in (["--chat"], ["--system", "Be brief."], ["--chat", "-sys", "Be brief."], []):
        assert main(["run", str(tiny), "ab", "-n", "2", "--ignore-eos", "--json", *words]) == 0
        lengths.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    plain, with_system, again, text = lengths
    assert text < plain < with_system == again


@pytest.mark.parametrize(
    ("words", "n"), [([], 128), (["--chat"], -1), (["--system", "a"], -1), (["--chat", "-n", "5"], 5)]
)
def test_a_conversation_has_no_limit(words: list[str], n: int) -> None:
    args = parser_of("run").parse(["-p", "x", *words])
    assert args is not None
    assert args.max_tokens == n


def test_a_model_without_a_prompt_opens_the_chat_on_a_terminal(tiny: Path, tmp_path: Path) -> None:
    with terminal(["run", str(tiny), "--system", "Be brief.", "-c", "128"], KVARN_CACHE=str(tmp_path)) as chat:
        chat.at_prompt()
        assert "context 128 tokens" in chat.text
        assert "Be brief." in chat.say("/system")
        assert "max_tokens          -1 (no limit)" in chat.say("/set")
        chat.type(CTRL_D)
        assert chat.leave() == 0


def test_without_a_prompt(tiny: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["run", str(tiny)]) == 2, "the output is no terminal"
    assert capsys.readouterr().err == (
        f'kvarn run: give a prompt: kvarn run {tiny} "TEXT", or -f FILE, or through a pipe; '
        f"for a conversation: kvarn chat {tiny}\n"
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for words in ([], [str(tiny), "--json"], [str(tiny), "--echo"], [str(tiny), "-p", "x"]):
        args = parser_of("run").parse(words)
        assert args is not None
        assert not hasattr(args, "command"), words
    with pytest.raises(UsageError, match="give a prompt"):
        prompt_of("--json")


def test_a_word_that_was_taken_for_the_prompt_is_said_on_a_terminal(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(flags, "DEFAULT_MODEL", str(tiny))
    for words, guessed in ((["hello"], "hello"), (["hello world"], None), (["-p", "hello"], None)):
        args = parser_of("run").parse(words)
        assert args is not None
        assert args.guessed == guessed
    monkeypatch.setenv("TERM", "xterm")
    said = io.StringIO()
    monkeypatch.setattr(said, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", said)
    assert main(["run", "hello", "-n", "2"]) == 0
    assert f"\x1b[2mcontinuing 'hello' with {tiny} (as an option: -p hello)\x1b[0m\n" in said.getvalue()


SIZES = {
    "10": 10,
    "10B": 10,
    "1.5K": 1536,
    "2m": 2 << 20,
    "3MB": 3 << 20,
    "3MiB": 3 << 20,
    "1gib": 1 << 30,
    "2GB": 2 << 30,
}


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_sizes(text: str, size: int) -> None:
    assert flags.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "M", "MB", "3T", "3 apples", "3iB", "inf"])
def test_what_is_no_size(text: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["run", f"--cache-bytes={text}"]) == 2
    assert "it must be a number of bytes, as in 500M or 2G" in capsys.readouterr().err


def test_perplexity_of_standard_input(tiny: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("abcdefgh" * 40))
    assert main(["perplexity", str(tiny), "-f", "-", "-c", "32", "--chunks", "2"]) == 0
    assert capsys.readouterr().out.startswith("perplexity ")
