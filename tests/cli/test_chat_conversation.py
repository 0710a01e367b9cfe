"""The messages of a chat: what fits into the context, what an interrupted answer leaves, and files of messages."""

import json
import os
from pathlib import Path

import pytest
from support.chat_script import Script, chat
from support.serving import tiny_model

from kvarn import LLM, SamplingParams
from kvarn.cli.chat import saved
from kvarn.cli.chat.commands import COMMANDS
from kvarn.cli.chat.conversation import Conversation
from kvarn.cli.chat.history import LONGEST, MOST_LINES, FileHistory
from kvarn.cli.chat.multiline import Quoted, message, next_line
from kvarn.cli.chat.session import Session, left_out
from kvarn.errors import KvarnError

CONTEXT = 256


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(tiny_model(tmp_path_factory.mktemp("model")), context=CONTEXT, max_seqs=1)


def test_the_oldest_turns_are_left_out_and_the_system_message_stays(llm: LLM) -> None:
    lines = [f"question {i} {'x' * 30}" for i in range(9)]
    script, conversation = chat(llm, *lines, system="Be brief.")
    assert len(conversation.messages) == 1 + 2 * 9, "the conversation itself is whole"
    assert 0 < conversation.left_out < 9
    assert script.notes
    assert all("left out of the prompt" in note for note in script.notes)
    prompt = llm.tokenizer.decode(conversation.last.request.prompt, special=True)
    assert prompt.startswith("<system>Be brief.\n<user>question")
    assert f"question {conversation.left_out} " in prompt
    assert f"question {conversation.left_out - 1} " not in prompt
    assert all("full" not in cost for cost in script.costs), "there was room for every answer"


def test_what_was_left_out_stays_left_out_so_that_the_cache_is_reused(llm: LLM) -> None:
    script, _ = chat(llm, *[f"question {i} {'x' * 30}" for i in range(12)])
    assert len(script.notes) < 8, "room is made for several turns at once"
    again = [int(cost.split()[4]) for cost in script.costs]
    assert sum(n > 0 for n in again) > 6, "most turns reuse the turns before them"


def test_a_message_that_is_too_long_alone_changes_nothing(llm: LLM) -> None:
    script, conversation = chat(llm, "short", "x" * 400, "short again")
    (note,) = script.notes
    assert note.startswith("this message is too long: with the chat template it has 4")
    assert f"the context holds {CONTEXT}" in note
    assert [m["content"] for m in conversation.messages if m["role"] == "user"] == ["short", "short again"]
    assert conversation.left_out == 0


def test_a_long_message_leaves_out_everything_else_if_it_must(llm: LLM) -> None:
    script, conversation = chat(llm, "one", "two", "x" * (CONTEXT - 40))
    assert script.notes == ["the two oldest turns no longer fit and were left out of the prompt"]
    assert conversation.n_turns == 3


def test_an_answer_that_fills_the_context_says_so(llm: LLM) -> None:
    script, conversation = chat(llm, "x" * 200, max_tokens=1 << 30)
    assert script.costs[0].endswith(f"; context full (-c {CONTEXT})")
    assert conversation.messages[-1]["content"]
    assert conversation.room == CONTEXT // 4
    script, _ = chat(llm, "ab", "/explain", max_tokens=1)
    assert script.costs[0].endswith("; stopped by -n 1")
    assert "\nthe answer has 1 token; the first came after " in script.said[0]


@pytest.mark.parametrize(("pieces", "kept"), [(2, True), (0, False)])
def test_ctrl_c_keeps_what_was_said(llm: LLM, pieces: int, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kept:  # the interrupt comes while the prompt is computed
        monkeypatch.setattr(llm.engine, "step", _interrupted)
    script, conversation = chat(llm, "ab", interrupt_after=pieces, max_tokens=100)
    assert script.costs[0].endswith("; stopped" if kept else "; stopped while reading the prompt (0 of 19)")
    assert conversation.waits != kept
    assert script.notes == ([] if kept else ["the question stays; /regenerate answers it"])
    if kept:
        assert conversation.messages[-1]["content"].startswith("".join(script.pieces))
    monkeypatch.undo()
    assert not llm.runner.busy
    assert llm.generate("ab", max_tokens=1)


def _interrupted() -> list:
    raise KeyboardInterrupt


def test_answering_again_replaces_the_answer_also_of_a_question_that_was_loaded(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"role": "user", "content": "ab"}]')
    script, conversation = chat(llm, "/regenerate", f"/load {tmp_path}/a.json", "/regenerate", "/regenerate")
    assert script.notes[0] == "there is no question yet that could be answered again"
    assert script.said == ["loaded 1 message; the last one is a question: /regenerate answers it"]
    assert script.notes[1:] == ["the temperature is 0, so the answer will be the same"], "not for the first answer"
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"]


def test_ctrl_c_twice_at_an_empty_line_says_how_to_leave(llm: LLM) -> None:
    once, _ = chat(llm, KeyboardInterrupt, "/help", KeyboardInterrupt)
    assert once.notes == []
    twice, _ = chat(llm, KeyboardInterrupt, KeyboardInterrupt)
    assert twice.notes == ["Ctrl-D or /quit leaves"]


@pytest.mark.parametrize("line", ["/quit", "/exit", "/bye"])
def test_commands_that_leave(llm: LLM, line: str) -> None:
    script, _ = chat(llm, line, "never read")
    assert script.lines == ["never read"]


def test_clear_keeps_the_system_message(llm: LLM) -> None:
    for line in ("/clear", "/reset"):
        script, conversation = chat(llm, "ab", line, "/explain", system="Be brief.")
        assert conversation.messages == [{"role": "system", "content": "Be brief."}]
        assert script.said == [
            "the conversation is forgotten; the system message stays",
            "nothing has been answered yet",
        ]
    script, conversation = chat(llm, '/system ""', "/system", system="Be brief.")
    assert conversation.system is None
    assert script.said[1].startswith("there is no system message of yours (the model's template may have its own); /sy")


def test_help_has_every_command(llm: LLM) -> None:
    script, _ = chat(llm, "/help")
    for name in COMMANDS:
        assert f"\n{name} " in f"\n{script.said[0]}"
    assert max(len(line) for line in script.said[0].splitlines()) < 80


def test_numbers_in_words() -> None:
    assert left_out(1) == "the oldest turn no longer fits and was left out of the prompt"
    assert left_out(12) == "the 12 oldest turns no longer fit and were left out of the prompt"


# -- files -------------------------------------------------------------------------------------------------------------

WRONG_FILES = {
    "{": "this is not JSON (line 1: ",
    "[]": "this must be a list of messages",
    '{"messages": []}': "this must be a list of messages",
    "[1]": 'message 1 is not an object with "role" and "content"',
    '[{"content": "x"}]': 'message 1 has no "role"',
    '[{"role": "user", "content": [1]}]': 'message 1 has a "content" that is not a string',
    '[{"role": "tool", "content": "x"}]': 'message 1 has the role "tool"; it must be one of system, user, assistant',
    '[{"role": "user", "content": "x", "name": "y"}]': 'message 1 has "name": only "role" and "content" are known',
    '[{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]': "message 2 is a system message; only",
    '[{"role": "user", "content": "\\ud800"}]': "message 1 has text that is not Unicode",
    "[" * 100_000: "this JSON is nested too deeply",
}


@pytest.mark.parametrize(("text", "error"), WRONG_FILES.items(), ids=range(len(WRONG_FILES)))
def test_files_that_are_no_conversations(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(KvarnError) as caught:
        saved.load(str(path))
    assert str(caught.value).startswith(f"{path}: {error}")


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "日本語\n\x1b"}]
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "latin").write_bytes(b"\xff")
    os.mkfifo(tmp_path / "pipe")
    for call, name, error in (
        (saved.load, "nowhere", "no such file"),
        (saved.load, ".", "this is not a file"),
        (saved.load, "pipe", "this is not a file"),
        (saved.load, "latin", "this is not UTF-8 text (byte 0)"),
        (lambda name: saved.save(name, said), "notes.txt", "exists and is no saved conversation: choose another name"),
        (lambda name: saved.save(name, said), "none/x", "No such file or directory"),
    ):
        with pytest.raises(KvarnError, match=error.replace("(", "\\(").replace(")", "\\)")):
            call(str(tmp_path / name))
    assert (tmp_path / "notes.txt").read_text() == "mine"
    saved.save(str(tmp_path / "a.json"), said)
    saved.save(str(tmp_path / "a.json"), said * 2)
    assert saved.load(str(tmp_path / "a.json")) == said * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "latin", "notes.txt", "pipe"]


def test_a_conversation_that_the_template_refuses_is_not_loaded(llm: LLM, tmp_path: Path, monkeypatch) -> None:
    def refuse(messages: object) -> list[int]:
        raise KvarnError("the chat template refused the messages: no")

    (tmp_path / "a.json").write_text('[{"role": "assistant", "content": "ab"}]')
    script, conversation = Script(f"/load {tmp_path}/a.json"), Conversation(llm, SamplingParams(), "Be brief.")
    monkeypatch.setattr(llm, "render", refuse)
    Session(conversation, script, script).loop()
    assert script.notes == ["the chat template refused the messages: no"]
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_the_history_is_bounded_and_survives_damage(tmp_path: Path) -> None:
    path = tmp_path / "new" / "chat_history"
    history = FileHistory(path)
    assert list(history.load_history_strings()) == []
    for text in ("a", "a", "b\nc", "x" * LONGEST):
        history.append_string(text)
    assert [json.loads(line) for line in path.read_text().splitlines()] == ["a", "b\nc"]
    with path.open("ab") as file:
        file.write(b"\xff\n{}\n" + b"".join(b'"%d"\n' % i for i in range(MOST_LINES + 10)))
    newest = list(FileHistory(path).load_history_strings())
    assert (newest[0], len(newest)) == (f"{MOST_LINES + 9}", MOST_LINES)
    assert len(path.read_text().splitlines()) == MOST_LINES // 2
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(FileHistory(path).load_history_strings()) == newest[: MOST_LINES // 2]


def test_a_history_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history = FileHistory(tmp_path / "file" / "chat_history")
    history.append_string("a")
    problem = history.take_problem()
    assert problem is not None
    assert problem == f"{tmp_path}/file: File exists; the history is not kept"
    history.append_string("b")
    assert history.take_problem() is None, "once"


def test_messages_of_several_lines() -> None:
    assert [next_line(text) for text in ("a", "a\\", '"""a', '"""a\\', '"""a"""', '"""')] == [
        None,
        "a\n",
        '"""a\n',
        '"""a\\\n',
        None,
        '"""\n',
    ]
    assert message(' """\n/a\n b """ ') == "/a\n b "
    assert isinstance(message('"""/a"""'), Quoted)
    assert not isinstance(message(" /a "), Quoted)
