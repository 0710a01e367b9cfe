"""Reasoning in `kvarn run --chat` and `kvarn chat`: dim on a terminal, not in a pipe, and before a structure."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chat_script import Script, chat
from support.scripted import HERMES, HERMES_CONTROL, scripted_llm, scripted_model

from kvarn import LLM, SamplingParams
from kvarn.cli import flags, main
from kvarn.cli.chat import saved, screen
from kvarn.cli.chat.conversation import Conversation
from kvarn.cli.chat.screen import TerminalScreen
from kvarn.cli.chat.session import Session

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OSLO = '{"city": "Oslo"}'
TEXTS = {
    "think": "<think>\nHm, \x1b[31m.\n</think>\n\nIt is **sunny**.",
    "json": f"<think>\nWhere?\n</think>\n\n{OSLO}",
    "only": "<think>\nHm.",
    "text": "It rains.",
}
DIM, NORMAL = "\x1b[2m", "\x1b[0m"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = scripted_model(tmp_path_factory.mktemp("model") / "tiny.gguf", HERMES, HERMES_CONTROL)
    with scripted_llm(model, TEXTS) as llm:
        yield llm


@pytest.fixture
def run(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(flags, "load", lambda args, trust_messages=False: llm)

    def run(name: str, *options: str) -> str:
        assert main(["run", "--chat", "--temp", "0", "-m", llm.name, "-p", f"play {name}", *options]) == 0
        return capsys.readouterr().out

    return run


def test_a_pipe_gets_the_answer_alone(run) -> None:
    assert run("think") == "It is **sunny**.\n"
    assert run("only") == "\n"
    assert run("json", "--json-schema", json.dumps(CITY)) == f"{OSLO}\n"


def test_json_has_the_reasoning(run) -> None:
    said = json.loads(run("json", "--json", "--json-schema", json.dumps(CITY)))
    assert (said["text"], said["reasoning"]) == (OSLO, "Where?")
    assert "reasoning" not in json.loads(run("text", "--json"))


def test_a_terminal_shows_reasoning_dim(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    styled = run("think")
    assert styled.startswith(DIM)
    assert styled.replace(DIM, "").replace(NORMAL, "") == "Hm, �[31m.\n\nIt is **sunny**.\n"
    assert NORMAL + "\n\nI" in styled
    assert DIM not in styled.partition("\n\n")[2]
    assert run("only").replace(DIM, "").replace(NORMAL, "") == "Hm.\n"
    monkeypatch.setenv("TERM", "dumb")
    assert run("think") == "It is **sunny**.\n"


def test_reasoning_is_a_part_of_the_conversation_and_of_its_file(llm: LLM, tmp_path: Path) -> None:
    conversation = Conversation(llm, SamplingParams(temperature=0, json_schema=CITY))
    script = Script("play json", f"/save {tmp_path / 'chat.json'}")
    Session(conversation, script, script).loop()
    assert ("".join(script.thoughts), "".join(script.pieces)) == ("Where?", OSLO)
    answer = {"role": "assistant", "content": OSLO, "reasoning_content": "Where?"}
    assert conversation.messages[1:] == saved.load(str(tmp_path / "chat.json"))[1:] == [answer]
    job = conversation.ask("play text").job
    llm.runner.cancel(job)
    prompt = llm.tokenizer.decode(job.request.prompt, special=True)
    assert f"assistant\n<think>\nWhere?\n</think>\n\n{OSLO}<|im_end|>" in prompt
    for message, words in [
        ({"role": "user", "content": "a", "reasoning_content": "b"}, 'has "reasoning_content"'),
        ({"role": "assistant", "content": "a", "reasoning_content": 1}, "that is not a string"),
        ({"role": "assistant", "content": "a", "reasoning_content": "\ud800"}, "not Unicode"),
    ]:
        with pytest.raises(ValueError, match=words):
            saved.checked([message], "file")


def test_an_answer_that_stops_in_its_reasoning_says_nothing(llm: LLM) -> None:
    script, conversation = chat(llm, "play think", interrupt_after=0, max_tokens=50)
    assert conversation.messages == [{"role": "user", "content": "play think"}]
    assert script.notes == ["the question stays; /regenerate answers it"]


@pytest.mark.parametrize("markdown", [True, False])
def test_a_chat_shows_reasoning_before_the_answer(markdown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(screen, "write", written.append)
    answer = TerminalScreen(markdown).answer()
    for piece in ("Hm, \x1b[2J", "so."):
        answer.think(piece)
    answer.add("Sunny.")
    answer.end()
    shown = "".join(written)
    before, _, after = shown.partition("\n\n")
    assert before == f"{DIM}Hm, �[2J{NORMAL}{DIM}so.{NORMAL}"
    assert "Sunny." in after
    assert DIM not in after
    written.clear()
    answer = TerminalScreen(markdown).answer()
    answer.think("Hm.")
    answer.end()
    assert "".join(written).replace(NORMAL, "") == f"{DIM}Hm.\n", "the next line follows at once"


def test_reasoning_after_text(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(screen, "write", written.append)
    answer = TerminalScreen().answer()
    for say, piece in ((answer.add, "One."), (answer.think, "Hm."), (answer.add, "Two.")):
        say(piece)
    answer.end()
    shown = "".join(written)
    assert shown.rindex("One.") < shown.index("Hm.") < shown.index("Two.")
    assert f"\n\n{DIM}Hm.{NORMAL}\n\n" in shown
