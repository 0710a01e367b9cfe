"""The commands of a chat: what they say, and that it is true."""

import signal
import stat
from pathlib import Path

import pytest
from support.chat_script import Script, chat
from support.serving import tiny_model

from kvarn import LLM
from kvarn.cli.chat.commands import find
from kvarn.cli.chat.conversation import Conversation
from kvarn.errors import KvarnError

SAME = "the temperature is 0, so the answer will be the same"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(tiny_model(tmp_path_factory.mktemp("model")), context=256, max_seqs=1)


def contents(conversation, role: str = "user") -> list[str]:
    return [message["content"] for message in conversation.messages if message["role"] == role]


WRONG_LINES = {
    "/hlep": "there is no command /hlep: did you mean /help? to send it as a message: //hlep",
    "/etc/hosts a": "there is no command /etc/hosts: /help lists the commands; to send it as a message: //etc/hosts a",
    "/clear all": "/clear takes nothing after it; to send it as a message: //clear all",
    "/": "there is no command /: /help lists the commands; to send it as a message: //",
}


@pytest.mark.parametrize(("line", "error"), WRONG_LINES.items())
def test_wrong_commands_get_one_line(line: str, error: str) -> None:
    with pytest.raises(KvarnError) as caught:
        find(line)
    assert str(caught.value) == error


def test_a_command_that_loses_text_is_never_a_guess() -> None:
    for line in ("/rese", "/rest", "/cleer", "/und", "/undoo", "/resett"):
        with pytest.raises(KvarnError, match=r"/help lists the commands|did you mean /(help|set|bye)\?"):
            find(line)
    assert find("/?")[0] == "/help"


@pytest.mark.parametrize("change", ["/system Other.", "/set max_tokens 5", "/set temperature 1"])
def test_the_same_answer_is_announced_only_if_nothing_changed(llm: LLM, change: str) -> None:
    assert chat(llm, "ab", "/regenerate")[0].notes == [SAME]
    assert chat(llm, "ab", change, "/regenerate")[0].notes == []
    notes = chat(llm, "ab", change, "/regenerate", change, "/regenerate")[0].notes
    assert notes == ([] if "temperature" in change else [SAME])


def interrupted_while_reading(llm: LLM, monkeypatch: pytest.MonkeyPatch, n_steps: int = 0) -> None:
    """Ctrl-C comes in this step; later ones are as always."""
    step, left = llm.engine.step, [n_steps]

    def once() -> list:
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", once)


def test_a_question_that_was_stopped_before_its_answer_waits(llm: LLM, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.json").write_text('[{"role": "user", "content": "loaded"}]')
    load = f"/load {tmp_path}/a.json"
    interrupted_while_reading(llm, monkeypatch)
    script, conversation = chat(llm, load, "/regenerate")
    assert script.notes == ["the question stays; /regenerate answers it"]
    assert (contents(conversation), conversation.waits) == (["loaded"], True)
    interrupted_while_reading(llm, monkeypatch)
    script, conversation = chat(llm, load, "/regenerate", "new")
    assert script.notes[1:] == ["this message replaces the question that has no answer"]
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    assert contents(conversation) == ["new"]


def test_an_answer_stays_if_another_one_was_stopped_before_it_began(llm: LLM, monkeypatch) -> None:
    n = [0]
    step = llm.engine.step

    def third_prompt_is_stopped() -> list:
        n[0] += 1
        if n[0] == 9:  # the prompt and eight tokens, without the last one's step
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", third_prompt_is_stopped)
    script, conversation = chat(llm, "ab", "/regenerate")
    assert script.notes[1:] == ["the earlier answer stays"]
    assert len(contents(conversation, "assistant")) == 1


def test_a_long_prompt_that_was_stopped_says_how_far_it_was(tmp_path: Path, monkeypatch) -> None:
    with LLM(tiny_model(tmp_path), context=2048, max_seqs=1, max_batch_tokens=32) as llm:
        interrupted_while_reading(llm, monkeypatch, 1)
        script, _ = chat(llm, "x" * 1500)
        assert script.costs == ["1,518 + 0 tokens, 0 reused; stopped while reading the prompt (32 of 1,518)"]


@pytest.mark.parametrize("place", ["end", "finish"])
def test_ctrl_c_after_the_last_token_does_not_lose_the_turn(llm: LLM, place: str, monkeypatch) -> None:
    owner = Script if place == "end" else Conversation
    whole = getattr(owner, place)

    def interrupt(*args: object, **named: object) -> object:
        signal.raise_signal(signal.SIGINT)
        return whole(*args, **named)

    monkeypatch.setattr(owner, place, interrupt)
    script, conversation = chat(llm, "ab")
    assert contents(conversation) == ["ab"]
    assert contents(conversation, "assistant") != [""]
    assert script.notes == ["stopped"]


def test_settings_are_shown_and_changed(llm: LLM) -> None:
    lines = ["/set", "/set temperature 0.5", "/set parameter num_predict 3", "/set --top-p 0.9", "/set seed 7", "ab"]
    script, conversation = chat(llm, *lines, "/set seed random", "/set n -1", "/set top_k")
    assert "temperature         0\n" in script.said[0]
    assert "seed                random\n" in script.said[0]
    assert script.said[1:] == [
        *("temperature is 0.5", "max_tokens is 3", "top_p is 0.9", "seed is 7", "seed is random"),
        *("max_tokens is -1 (no limit)", "top_k is 0"),
    ]
    assert (conversation.params.temperature, conversation.params.seed) == (0.5, None)
    assert script.costs[0].endswith("; stopped by -n 3")


WRONG_SETTINGS = {
    "/set parameter": "there is no setting parameter: /set lists the settings",
    "/set temprature 1": "there is no setting temprature: did you mean temperature?",
    "/set temperature hot": "temperature is 'hot'; it must be a number",
    "/set temperature -1": "temperature is -1.0; it must be 0 (greedy) or more",
    "/set top_k 1.5": "top_k is '1.5'; it must be a whole number",
    "/set max_tokens 0": "max_tokens is 0; it must be at least 1, or -1 for no limit",
    "/set num_ctx 9": "num_ctx is fixed during a chat: start kvarn with -c",
    "/set system x": "the system message is set with /system TEXT",
    "/set top_p 1 2": "/set top_p takes one number: /set top_p VALUE",
}


def test_wrong_settings_get_one_line(llm: LLM) -> None:
    script, conversation = chat(llm, *WRONG_SETTINGS)
    assert script.notes == list(WRONG_SETTINGS.values())
    assert conversation.params == chat(llm)[1].params


def test_undo_removes_the_last_turn(llm: LLM, tmp_path: Path) -> None:
    script, conversation = chat(llm, "ab", "cd", "/undo", "/undo", "/undo", system="Be brief.")
    assert script.said == [
        "removed the last question and its answer; 1 turn before it",
        "removed the last question and its answer; nothing was before it",
    ]
    assert script.notes == ["there is no question yet that could be removed"]
    assert [message["role"] for message in conversation.messages] == ["system"]
    _, conversation = chat(llm, *[f"question {i} {'x' * 30}" for i in range(9)], *["/undo"] * 8, "more")
    assert len(contents(conversation)) == 2
    assert conversation.left_out < 2


def test_the_system_message_in_words(llm: LLM) -> None:
    none = "there is no system message of yours (the model's template may have its own)"
    script, _ = chat(llm, "/system", '/system ""', "/system A.", "/system B.", '/system ""')
    assert script.said == [
        f"{none}; /system TEXT sets one",
        none,
        *(f"the system message is {done}" for done in ("set", "replaced", "removed")),
    ]


def test_the_part_that_is_too_long_is_named(llm: LLM) -> None:
    script, _ = chat(llm, "ab", system="x" * 400)
    assert script.notes[0].startswith("the system message is too long: with this message and the chat template it has")
    assert "shorten it (/system TEXT)" in script.notes[0]
    script, _ = chat(llm, "x" * 400, system="Be brief.")
    assert script.notes[0].startswith("this message is too long: with the system message and the chat template it has")


def test_names_of_files(llm: LLM, tmp_path: Path) -> None:
    for quote, name in (('"', "a b.json"), ("'", "c d.json"), ("", "e f.json")):
        script, _ = chat(llm, "ab", f"/save {quote}{tmp_path}/{name}{quote}", f"/load {quote}{tmp_path}/{name}{quote}")
        assert [said.split()[0] for said in script.said] == ["saved", "loaded"]
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert len(list(tmp_path.iterdir())) == 3
    script, _ = chat(llm, "ab", "/load ~nouser/x", "/save ~nouser/x", "/load a\0b", "/save a\0b", '/save ""')
    assert [note.split(";")[0] for note in script.notes] == [
        *["there is no home folder ~nouser"] * 2,
        *["a\ufffdb cannot be a path: it has a NUL character"] * 2,
        "/save FILE: give the name of a file",
    ]


def test_an_empty_answer_is_visible(llm: LLM) -> None:
    first = chat(llm, "ab", max_tokens=1)[1].last.output().tokens[0]
    script, conversation = chat(llm, "ab", stop_token_ids=(first,))
    assert script.notes == ["(empty answer)"]
    assert script.costs[0].endswith(" + 1 tokens, 18 reused; stop token")
    assert contents(conversation, "assistant") == [""]


def test_the_cache_in_words(llm: LLM) -> None:
    script, _ = chat(llm, "ab", "/cache")
    assert "1 of 1 block in use" in script.said[0]
