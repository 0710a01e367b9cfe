"""`kvarn chat` as a person uses it: the real program in a pseudo-terminal, and in a pipe."""

import contextlib
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.input.typeahead import get_typeahead
from prompt_toolkit.key_binding.key_processor import KeyPress
from support.serving import MAIN, tiny_model
from support.terminal import CTRL_C, CTRL_D, CTRL_R, CTRL_Z, ENTER, ESCAPE, TAB, UP, Terminal, pasted, terminal

from kvarn.cli import main
from kvarn.cli.chat.keyboard import TerminalKeyboard

COLOUR = re.compile(rb"\x1b\[[0-9;]*\b(3[0-8]|4[0-8]|9[0-7])\b[0-9;]*m")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 1 << 15)


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """A chat whose answers have four tokens."""
    folder = tmp_path_factory.mktemp("cache")
    flags = ["-n", "4", "--temp", "1", "--seed", "1", "--ignore-eos", "--system", "Be brief.", "--no-history"]
    with terminal(["chat", "-m", str(model), *flags], KVARN_CACHE=str(folder)) as opened:
        opened.at_prompt()
        yield opened
        opened.type("/bye" + ENTER)
        assert opened.leave() == 0
    assert not list(folder.iterdir()), "--no-history"


@pytest.fixture
def chat(running: Terminal) -> Terminal:
    running.say("/clear")
    return running


def messages(chat: Terminal, folder: Path) -> list[dict]:
    name = folder / "saved.json"
    assert "saved " in chat.say(f"/save {name}")
    return json.loads(name.read_text())


def questions(chat: Terminal, folder: Path) -> list[str]:
    return [message["content"] for message in messages(chat, folder) if message["role"] == "user"]


def test_greeting_names_the_model_the_context_and_the_cache(running: Terminal, model: Path) -> None:
    lines = "".join(running.text.split("\n")[:4])
    assert str(model) in lines
    assert "tiny; context 4096 tokens; cache" in lines
    assert "/help lists the commands" in running.text


def test_a_paste_of_three_lines_is_one_message(chat: Terminal, tmp_path: Path) -> None:
    chat.say(pasted("one\ntwo\nthree"))
    assert questions(chat, tmp_path) == ["one\ntwo\nthree"]


def test_ways_to_type_several_lines(chat: Terminal, tmp_path: Path) -> None:
    chat.say(f"a{ESCAPE}{ENTER}b")
    chat.say(f"c\\{ENTER}d")
    chat.say(f'"""{ENTER}/e\\{ENTER}f{ENTER}"""')
    assert questions(chat, tmp_path) == ["a\nb", "c\nd", "/e\\\nf"]


def test_a_message_that_begins_with_a_slash(chat: Terminal, tmp_path: Path) -> None:
    shown = chat.say("/etc/hosts what").replace("\n", " ")
    assert "/etc/hosts: /help lists the commands; to send it as a message: //etc/hosts what" in shown
    assert "did you mean /explain?" in chat.say("/explian")
    chat.say("//etc/hosts what")
    assert questions(chat, tmp_path) == ["/etc/hosts what"]


def test_a_saved_conversation_goes_on(chat: Terminal, tmp_path: Path) -> None:
    chat.say("one")
    before = messages(chat, tmp_path)
    assert [message["role"] for message in before] == ["system", "user", "assistant"]
    chat.say("/clear")
    assert "loaded 3 messages" in chat.say(f"/load {tmp_path}/sav{TAB}")
    assert messages(chat, tmp_path) == before
    (tmp_path / "bad.json").write_text('[{"role": "user"}]')
    assert 'message 1 has no "content"' in chat.say(f"/load {tmp_path}/bad.json").replace("\n", " ")
    assert messages(chat, tmp_path) == before


def test_the_last_question_is_answered_again(chat: Terminal, tmp_path: Path) -> None:
    chat.say("one")
    first = messages(chat, tmp_path)
    chat.say("/regenerate")
    second = messages(chat, tmp_path)
    assert first[:2] == second[:2]
    assert first[2]["content"] != second[2]["content"], "a new draw, although there is a seed"


def test_a_new_system_message_keeps_the_turns(chat: Terminal, tmp_path: Path) -> None:
    chat.say("one")
    assert "replaced; the conversation goes on" in chat.say("/system Be long.")
    assert "Be long." in chat.say("/system")
    assert [m["content"] for m in messages(chat, tmp_path)][:2] == ["Be long.", "one"]
    chat.say("/system Be brief.")


def test_what_an_answer_cost(chat: Terminal) -> None:
    assert re.search(r"\d+ \+ 4 tokens, \d+ reused(, [\d,]+/s)?; stopped by -n 4", chat.say("ab"))
    shown = chat.say(f"/expl{TAB}").replace("\n", " ")
    assert re.search(r"reused \d+ of \d+ prompt tokens.* the answer has 4 tokens", shown)
    assert re.search(r"held +\d+ tokens of 4,096 \(\d+%\)", chat.say("/cache"))


def test_ctrl_c_at_the_prompt(chat: Terminal, tmp_path: Path) -> None:
    chat.type("abandoned")
    chat.wait_for("> abandoned")
    chat.type(CTRL_C)
    chat.until(lambda shown: "abandoned" not in shown.split("\n")[-1], "an empty line")
    chat.say("kept")
    assert questions(chat, tmp_path) == ["kept"]
    chat.type(CTRL_C + CTRL_C)
    chat.wait_for("Ctrl-D or /quit leaves")
    chat.at_prompt()


def test_history_is_kept_across_runs_and_for_its_owner_only(model: Path, tmp_path: Path) -> None:
    arguments = ["chat", "-m", str(model), "-n", "1"]
    with terminal(arguments, KVARN_CACHE=str(tmp_path)) as first:
        first.at_prompt()
        first.say("the first line")
        first.say(pasted("the\nsecond"))
        first.type(CTRL_D)
        assert first.leave() == 0
        assert first.text.endswith("\n>")
        assert first.line_of_cursor == "", "the shell's prompt begins on a new line"
    file = tmp_path / "chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [json.loads(line) for line in file.read_text().splitlines()] == ["the first line", "the\nsecond"]
    with terminal(arguments, KVARN_CACHE=str(tmp_path)) as second:
        second.at_prompt()
        second.type(UP)
        second.wait_for("> the\n  second")
        second.type(CTRL_C)
        second.at_prompt()
        second.type(CTRL_R + "firs")
        second.wait_for("the first line")
        second.type(ENTER + ENTER)
        second.wait_for(" reused")
        assert "> the first line" in second.text
        second.at_prompt()
        second.process.send_signal(signal.SIGTERM)
        assert second.leave() == 128 + signal.SIGTERM
        assert second.echoes, "the terminal is as it was"
        assert "Traceback" not in second.text


def test_typing_and_interrupting_during_an_answer(model: Path, tmp_path: Path) -> None:
    """The answer would go on for 32,000 tokens."""
    arguments = ["chat", "-m", str(model), "-c", "0", "--temp", "1", "--seed", "1", "--ignore-eos"]
    with terminal(arguments, KVARN_CACHE=str(tmp_path), NO_COLOR="1") as chat:
        chat.at_prompt()
        assert not chat.echoes
        chat.type("ab" + ENTER)
        chat.until(lambda shown: len(shown.partition("> ab\n")[2]) > 40, "the beginning of an answer")
        chat.type("typed ahead")
        chat.type(CTRL_C)
        chat.wait_for("; stopped")
        chat.wait_for("> typed ahead")
        answer = chat.text.partition("> ab\n")[2].partition("; stopped")[0]
        assert "typed ahead" not in answer
        chat.type(ENTER)
        chat.until(lambda shown: len(shown.partition("> typed ahead\n")[2]) > 40, "the beginning of another answer")
        chat.type(pasted("two\nlines") + CTRL_C)
        chat.wait_for("> two\n  lines")
        chat.type(CTRL_C)
        said = messages(chat, tmp_path)
        assert [m["content"] for m in said if m["role"] == "user"] == ["ab", "typed ahead"]
        assert all(m["content"] for m in said), "what was said before Ctrl-C stays"
        assert not COLOUR.search(chat.raw), "NO_COLOR"
        chat.type("cd" + ENTER)
        chat.until(lambda shown: len(shown.partition("> cd\n")[2]) > 40, "the beginning of an answer")
        chat.process.send_signal(signal.SIGTERM)
        assert chat.leave() == 128 + signal.SIGTERM
        assert chat.echoes, "the terminal is as it was"


def test_keys_that_are_read_as_ctrl_c_arrives_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with create_pipe_input() as typed:
        read = typed.read_keys

        def interrupted() -> list[KeyPress]:
            keys = read()
            signal.raise_signal(signal.SIGINT)
            return keys

        monkeypatch.setattr(typed, "read_keys", interrupted)
        keyboard = TerminalKeyboard.__new__(TerminalKeyboard)
        keyboard._input = typed
        typed.send_text("typed ahead")
        with pytest.raises(KeyboardInterrupt):
            keyboard.keep()
        assert "".join(key.data for key in get_typeahead(typed)) == "typed ahead"


def test_suspending_restores_the_terminal(model: Path, tmp_path: Path) -> None:
    with terminal(["chat", "-m", str(model), "-c", "0", "--ignore-eos"], KVARN_CACHE=str(tmp_path)) as chat:
        chat.at_prompt()
        chat.type("ab" + ENTER)
        chat.until(lambda shown: len(shown.partition("> ab\n")[2]) > 40, "the beginning of an answer")
        chat.type(CTRL_Z)
        chat.until_stopped()
        assert chat.echoes, "the shell gets its terminal"
        chat.process.send_signal(signal.SIGCONT)
        before = len(chat.raw)
        chat.until(lambda shown: len(chat.raw) > before + 200, "more of the answer")
        assert not chat.echoes
        chat.type(CTRL_C)
        chat.wait_for("; stopped")


def test_a_failed_line_in_a_pipe_is_an_exit_status(model: Path, capsys, monkeypatch) -> None:
    for typed, status in (("ab\n/load /nowhere\n/help\n", 1), ("ab\n/help\n", 0)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        assert main(["chat", str(model), "-n", "2"]) == status
        said = capsys.readouterr()
        assert said.err == ("/nowhere: no such file\n" if status else "")
        assert "lists the commands" not in said.err
        assert "//TEXT" in said.out, "the lines after it are read"


def test_a_terminal_that_cannot_move_its_cursor(model: Path, tmp_path: Path) -> None:
    with terminal(["chat", "-m", str(model), "-n", "2"], TERM="dumb", KVARN_CACHE=str(tmp_path)) as chat:
        chat.wait_for(">")
        chat.type('"""one\ntwo"""\n')
        chat.wait_for(" reused")
        chat.type(f"/save {tmp_path}/saved.json\n")
        chat.wait_for("saved 2 messages")
        chat.type(CTRL_D)
        assert chat.leave() == 0
        assert b"\x1b" not in chat.raw
    assert json.loads((tmp_path / "saved.json").read_text())[0]["content"] == "one\ntwo"


def test_a_pipe_gets_plain_text_and_a_terminal_gets_no_control_characters(model: Path) -> None:
    """The tiny model says any byte. The seed is one whose answer has an escape."""
    flags = ["-n", "60", "--seed", "3", "--ignore-eos", "--repeat-penalty", "1"]
    flags += ["--temp", "3", "--top-k", "0", "--top-p", "1", "--min-p", "0"]
    command = [sys.executable, "-c", MAIN, "chat", "-m", str(model), *flags]
    typed, environment = b"ab\n\xff\n/nosuch\n", os.environ | {"TERM": "xterm"}
    piped = subprocess.run(command, input=typed, capture_output=True, env=environment, timeout=60)
    assert piped.returncode == 1, "a line was refused"
    assert piped.stderr.decode() == (
        "there is no command /nosuch: /help lists the commands; to send it as a message: //nosuch\n"
    )
    assert b"\x1b" in piped.stdout, "a pipe gets the answer as it is"
    assert b"tokens" not in piped.stdout
    shown = on_a_terminal(command, typed, environment)
    assert len(shown) > 100
    answers = shown.replace(b"\r\x1b[2K", b"")  # the progress of loading
    assert not set(answers) & (set(range(32)) - set(b"\n\r\t"))


def on_a_terminal(command: list[str], typed: bytes, environment: dict[str, str]) -> bytes:
    """What a program writes to a terminal when its input is a pipe."""
    master, slave = os.openpty()
    with os.fdopen(master, "rb", buffering=0) as reader:
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=slave, stderr=slave, env=environment)
        finally:
            os.close(slave)
        with process:
            assert process.stdin is not None
            process.stdin.write(typed)
            process.stdin.close()
            shown = b""
            with contextlib.suppress(OSError):  # the other end is closed
                while piece := reader.read(65536):
                    shown += piece
    assert process.returncode == 1
    return shown
