"""Worked misses: traffic as agents send it, and what the explanation says about it."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.scripted import CUT, HERMES, HERMES_CONTROL, TEXT, Client, scripted_llm, scripted_model, serving

from kvarn.server.access import Access

# In the shape of Qwen3: reasoning stays only in the turns after the last question.
QWEN = """\
{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}
{%- endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CLAUDE_CODE = "You are an agent. Work in the folder /src and run the tests before you say that you are done."
TEXTS = {
    "hello": "Hello there.",
    "think": "<think>\nThe user greets me.\n</think>\n\nHello there.",
    "cut": f"a crab c{CUT}a{CUT}b in a boat",
    "title": "Crabs",
    "call": '<tool_call>\n{"name":"look","arguments":{"at":"sea","n":3}}\n</tool_call>',
}
LOOK = {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}}


def tool(name: str, description: str = "looks at things") -> dict:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": LOOK}}


def server(folder: Any, template: str = HERMES) -> Any:
    model = scripted_model(folder / "tiny.gguf", template, HERMES_CONTROL, context=4096)
    return serving(scripted_llm(model, TEXTS, block_size=16), Access(["alice", "bob"]))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with server(tmp_path_factory.mktemp("hermes")) as client:
        yield client


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with server(tmp_path_factory.mktemp("qwen"), QWEN) as client:
        yield client


def said(role: str, content: str, **more: Any) -> dict:
    return {"role": role, "content": content, **more}


def chat(client: Client, *messages: dict, salt: str, **fields: Any) -> dict:
    """Streamed and not, both say the same of a prompt, apart from what the first request has left in the cache."""
    body = {"messages": list(messages), "temperature": 0, "max_tokens": 80, "cache_salt": salt} | fields
    reply = client.ask(key="alice", **body)
    assert reply.status == 200, reply.body
    return reply.json


def ended(answer: dict) -> dict:
    return answer["kvarn"]["reuse_ended"]


def test_a_line_that_changes_with_each_request(client: Client) -> None:
    """Claude Code's first system block."""

    def system(stamp: str) -> dict:
        return said("system", f"x-anthropic-billing-header: cc_version=2.1.70; cch={stamp};\n{CLAUDE_CODE}")

    chat(client, system("a1b2c"), said("user", "play hello"), salt="bill")
    answer = chat(client, system("0f9e3"), said("user", "play hello"), salt="bill")
    found = ended(answer)
    assert (found["reason"], found["kind"]) == ("a line that changes every time", "client stamp")
    assert found["line"] == "x-anthropic-billing-header: cc_version=2.1.70; cch=0f9e3;"
    assert found["part"] == {"name": "system"}
    assert found["remedy"] == "set CLAUDE_CODE_ATTRIBUTION_HEADER=0 where Claude Code runs"
    assert "a stamp that Claude Code writes" in answer["kvarn"]["because"]
    text = client.llm.tokenizer.decode(client.llm.tokenizer.encode(system("0f9e3")["content"]))
    assert text[found["character"] - len("<|im_start|>system\n")] == "0"


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ("It is 10:41:07 now.", "It is 10:41:56 now.", "clock"),
        ("Today is 2026-11-16.", "Today is 2026-11-17.", "date"),
        ("Today is Monday, 16 November 2026.", "Today is Tuesday, 17 November 2026.", "date"),
        ("Request 812 of this day", "Request 813 of this day", "counter"),
        ("session f3a9c0d17be2", "session 07de11aa92c4", "hash"),
        ("id=3b1f8c1e-8a52-4a39-9a65-1f0a86a1d0aa", "id=9c0d11aa-8a52-4a39-9a65-1f0a86a1d0aa", "hash"),
    ],
)
def test_lines_with_clocks_dates_counters_and_hashes(client: Client, first: str, second: str, kind: str) -> None:
    for line in (first, second):
        system = said("system", f"You help.\n{line}\nBe brief.")
        answer = chat(client, system, said("user", "play hello"), salt=kind + first)
    found = ended(answer)
    assert (found["reason"], found["kind"], found["line"]) == ("a line that changes every time", kind, second)
    assert found["remedy"] == "leave the line out, or move it to the end of the conversation"


def test_a_system_message_that_was_edited(client: Client) -> None:
    for style in ("short answers", "long answers"):
        answer = chat(client, said("system", f"You give {style}."), said("user", "play hello"), salt="edit")
    found = ended(answer)
    assert (found["reason"], found["part"]) == ("system changed", {"name": "system"})
    assert answer["kvarn"]["because"] == f"the system message changed at token {found['at']}"


def test_tools_that_changed(client: Client) -> None:
    question = said("system", "You help."), said("user", "play hello")
    chat(client, *question, salt="tools", tools=[tool("look"), tool("listen")])
    found = ended(chat(client, *question, salt="tools", tools=[tool("look"), tool("smell")]))
    assert (found["reason"], found["part"]) == ("tools changed", {"name": "tools"})
    found = ended(chat(client, *question, salt="tools", tools=[tool("look", "looks closely"), tool("listen")]))
    assert found["reason"] == "tools changed"


def test_reasoning_that_the_template_drops(qwen: Client) -> None:
    start = said("user", "play think")
    first = chat(qwen, start, salt="drop")["choices"][0]["message"]
    assert first["reasoning_content"] == "The user greets me."
    answer = chat(qwen, start, first | {"refusal": None}, said("user", "play hello"), salt="drop")
    found = ended(answer)
    assert (found["reason"], found["kind"]) == ("turn rewritten", "reasoning dropped by the template")
    assert found["part"] == {"name": "turn", "turn": 1, "role": "assistant"}
    assert "dropped the reasoning of turn 1 (assistant)" in answer["kvarn"]["because"]
    assert "previous_response_id" in found["remedy"]


def test_reasoning_that_the_client_does_not_send_back(client: Client) -> None:
    start = said("user", "play think")
    first = chat(client, start, salt="lost")["choices"][0]["message"]
    turn = said("assistant", first["content"])
    found = ended(chat(client, start, turn, said("user", "play hello"), salt="lost"))
    assert (found["reason"], found["kind"]) == ("turn rewritten", "reasoning not sent back")
    assert "reasoning_content" in found["remedy"]
    sent = chat(client, start, first | {"refusal": None}, said("user", "play hello"), salt="lost")
    assert ended(sent)["at"] > found["at"], "with its reasoning the turn is the same"


def test_the_same_text_in_other_tokens(client: Client) -> None:
    """The model writes `a` and `b`; encoding its text gives `ab`."""
    a, b, ab = (client.llm.tokenizer.encode(text, bos=False)[0] for text in ("a", "b", "ab"))
    start = said("user", "play cut")
    first = chat(client, start, salt="cut")["choices"][0]["message"]["content"]
    answer = chat(client, start, said("assistant", first), said("user", "play hello"), salt="cut")
    found = ended(answer)
    assert (found["reason"], found["tokens"]) == ("same text, other tokens", {"ours": [ab], "theirs": [a, b]})
    assert found["part"] == {"name": "turn", "turn": 1, "role": "assistant"}
    assert found["character"] == len("<|im_start|>user\nplay cut<|im_end|>\n<|im_start|>assistant\na crab c")
    assert f"[{a}, {b}] then, [{ab}] now" in answer["kvarn"]["because"]
    messages = [start, said("assistant", first), said("user", "play hello")]
    encoded = client.ask("/tokenize", key="alice", messages=messages).json["tokens"]
    assert encoded.count(ab) == 2, "of crab, too"
    assert len(encoded) == answer["usage"]["prompt_tokens"], "nothing that is remembered is put into the prompt"


def test_a_call_that_the_template_writes_otherwise(client: Client) -> None:
    """The model writes JSON without spaces; the template writes it with spaces."""
    start, tools = said("user", "play call"), [tool("look")]
    first = chat(client, start, salt="call", tools=tools)["choices"][0]["message"]
    result = said("tool", "water", tool_call_id=first["tool_calls"][0]["id"])
    found = ended(chat(client, start, first, result, said("user", "play hello"), salt="call", tools=tools))
    assert (found["reason"], found["kind"]) == ("turn rewritten", "same message, written otherwise")
    assert found["part"]["turn"] == 1


def test_a_turn_that_the_client_changed(client: Client) -> None:
    start = said("user", "play hello")
    for text in ("Hello there.", "Hello you."):
        answer = chat(client, start, said("assistant", text), said("user", "play hello"), salt="turn")
    found = ended(answer)
    assert (found["reason"], found["part"]["turn"], found["part"]["role"]) == ("differs", 1, "assistant")
    assert answer["kvarn"]["because"].endswith("from the nearest earlier text, in turn 1 (assistant)")


def test_a_side_request_for_a_title(client: Client) -> None:
    """It has the conversation inside a new prompt. The conversation itself goes on as if nothing had happened."""
    talk = [said("system", CLAUDE_CODE), said("user", "play hello")]
    first = chat(client, *talk, salt="title")
    inside = f"Write a title for this chat:\n{json.dumps(talk)}\nplay title"
    side = chat(client, said("system", "You write titles."), said("user", inside), salt="title")
    assert ended(side)["reason"] == "system changed"
    assert side["choices"][0]["message"]["content"] == "Crabs"
    talk += [said("assistant", first["choices"][0]["message"]["content"]), said("user", "play hello")]
    found = chat(client, *talk, salt="title")["kvarn"]
    assert found["reuse_ended"]["reason"] == "new from here on"
    assert found["reused_tokens"] > first["kvarn"]["prompt_tokens"]


def test_streams_have_the_same_explanation(client: Client) -> None:
    question = said("system", "You give short answers, stream."), said("user", "play hello")
    chat(client, *question, salt="stream")
    body = {"temperature": 0, "max_tokens": 80, "cache_salt": "stream", "key": "alice"}
    messages = [said("system", "You give long answers, stream."), said("user", "play hello")]
    whole = client.ask(messages=messages, **body).json["kvarn"]
    other = [said("system", "You give no answers, stream."), said("user", "play hello")]
    stream = client.ask(messages=other, stream=True, **body).events[-1]["kvarn"]
    assert (ended({"kvarn": whole})["reason"], ended({"kvarn": stream})["reason"]) == ("system changed",) * 2


def test_a_call_that_was_left_is_explained_too(client: Client) -> None:
    for day in ("Monday", "Tuesday"):
        messages = [said("system", f"Today is {day}."), said("user", "play hello")]
        client.ask(key="alice", messages=messages, stream=True, temperature=0, cache_salt="left", leave_at=2)
        client.until(lambda: not client.llm.engine.busy)
    end = time.monotonic() + 60
    found: dict = {}
    while found.get("reason") != "a line that changes every time" and time.monotonic() < end:
        found = client.get("/kvarn/requests", "alice").json["data"][0]["reuse_ended"]
    assert (found["reason"], found["kind"]) == ("a line that changes every time", "date")


def test_another_key_learns_nothing(client: Client) -> None:
    chat(client, said("system", "The word is hunter2."), said("user", "play hello"), salt="x")
    reply = client.ask(
        key="bob", messages=[said("system", "The word is swordfish."), said("user", "play hello")], cache_salt="x"
    )
    assert "hunter" not in reply.body.decode()
    assert ended(reply.json)["reason"] == "nothing shared"


def test_numbers_in_a_question_are_no_counter(client: Client) -> None:
    for sum in ("2 + 2", "2 + 3"):
        answer = chat(client, said("user", f"play hello, what is {sum}?"), salt="sums")
    assert (ended(answer)["reason"], ended(answer)["part"]["turn"]) == ("differs", 0)
    for most in ("10", "20"):
        limits = {"type": "object", "properties": {"n": {"type": "integer", "maximum": int(most)}}}
        look = {"type": "function", "function": {"name": "look", "description": "d", "parameters": limits}}
        answer = chat(client, said("user", "play hello"), salt="limits", tools=[look])
    assert ended(answer)["reason"] == "tools changed"


FALSE_STAMPS = [  # two beginnings that have numbers or dates, and nothing that changes with each request
    ([("user", "play hello, 12 + 3?"), ("assistant", "15"), ("user", "play hello")],
     [("user", "play hello, 45 + 3?"), ("assistant", "48"), ("user", "play hello")], "differs"),
    ([("user", "play hello of 2024-01-03"), ("assistant", "a"), ("user", "play hello")],
     [("user", "play hello of 2023-01-03"), ("assistant", "b"), ("user", "play hello")], "differs"),
    ([("system", "You are GPT 4 of a firm"), ("user", "play hello")],
     [("system", "You are GPT 5 of mine"), ("user", "play hello")], "system changed"),
    ([("system", "You know nothing."), ("user", "play hello")],
     [("system", "You know 100 things."), ("user", "play hello")], "system changed"),
    ([("user", "play hello"), ("assistant", "yes"), ("user", "play hello")],
     [("user", "play hello "), ("assistant", "yes"), ("user", "play hello")], "differs"),
    ([("user", "play hello"), ("assistant", "yes"), ("user", "play hello")],
     [("user", "play hello"), ("assistant", "yes\n"), ("user", "play hello")], "differs"),
]  # fmt: skip


@pytest.mark.parametrize(("then", "now", "reason"), FALSE_STAMPS)
def test_no_cause_is_made_up(client: Client, then: list, now: list, reason: str) -> None:
    for messages in (then, now):
        answer = chat(client, *(said(*each) for each in messages), salt=f"made up {now}")
    assert ended(answer)["reason"] == reason


def test_a_date_before_the_first_question_changes_in_the_same_conversation(client: Client) -> None:
    def start(day: str) -> dict:
        return said("user", f"Today is {day}.\nplay hello")

    first = chat(client, start("Monday"), salt="first turn")["choices"][0]["message"]
    turns = said("assistant", first["content"]), said("user", "play hello")
    found = ended(chat(client, start("Tuesday"), *turns, salt="first turn"))
    assert (found["reason"], found["line"]) == ("a line that changes every time", "Today is Tuesday.")
    assert found["part"] == {"name": "turn", "turn": 0, "role": "user"}


def test_a_number_that_is_longer_than_before(client: Client) -> None:
    for n in ("Request 123", "Request 12"):
        answer = chat(client, said("system", n), said("user", "play hello"), salt="longer")
    assert (ended(answer)["kind"], ended(answer)["line"]) == ("counter", "Request 12")


def test_a_turn_of_another_conversation_is_not_called_rewritten(client: Client) -> None:
    """The chat with the same first turn has another salt, so its text is not the one that differs."""
    chat(client, said("user", "play hello"), said("assistant", "yes"), said("user", "play hello"), salt="other one")
    chat(client, said("system", "You bark."), said("user", "play hello"), salt="this one")
    answer = chat(client, said("user", "play hello"), said("assistant", "yes"), said("user", "x"), salt="this one")
    assert ended(answer)["reason"] == "differs"


def test_a_shorter_answer_that_is_continued_is_not_called_rewritten(client: Client) -> None:
    """A longer answer to the same question is in the cache. All tokens of the shorter one are reused."""
    start = said("user", "play hello")
    chat(client, start, salt="cut short")
    cut = chat(client, start, salt="cut short", max_tokens=4)["choices"][0]["message"]["content"]
    answer = chat(client, start, said("assistant", cut), said("user", "play hello"), salt="cut short")
    assert ended(answer)["reason"] == "differs"


def test_a_turn_that_the_client_wrote_itself_had_no_reasoning(client: Client) -> None:
    start = said("user", "play think")
    chat(client, start, salt="shots")
    found = ended(chat(client, start, said("assistant", "Good day."), said("user", "play hello"), salt="shots"))
    assert (found["reason"], found["part"]["turn"]) == ("differs", 1)


def test_a_date_that_the_template_writes(tmp_path: Path) -> None:
    with server(tmp_path, HERMES.replace("{% if tools", "Today is {{ day }}.\n{% if tools", 1)) as client:
        for day in ("Monday", "Tuesday"):
            variables = {"chat_template_kwargs": {"day": day}}
            answer = chat(client, said("user", "play hello"), salt="template", **variables)
        found = ended(answer)
        assert (found["reason"], found["part"]) == ("a line that changes every time", {"name": "template"})
        assert "chat_template_kwargs" in found["remedy"]


def test_without_keys_causes_are_told_and_texts_are_not(tmp_path: Path) -> None:
    model = scripted_model(tmp_path / "tiny.gguf", QWEN, HERMES_CONTROL, context=4096)
    with serving(scripted_llm(model, TEXTS, block_size=16), Access([])) as client:

        def ask(*messages: dict) -> tuple[dict, dict]:
            reply = client.ask(messages=list(messages), temperature=0, max_tokens=80)
            stored = client.get(f"/kvarn/requests/{reply.json['id']}").json
            assert (ended(reply.json)["reason"], stored["because"]) == (
                stored["reuse_ended"]["reason"],
                reply.json["kvarn"]["because"],
            )
            assert not {"line", "tokens", "before", "ours", "theirs"} & stored["reuse_ended"].keys()
            assert "theirs" not in ended(reply.json)
            return reply.json, ended(reply.json)

        ask(said("user", "play think"))
        turn = said("assistant", "Hello there.", reasoning_content="The user greets me.")
        _, found = ask(said("user", "play think"), turn, said("user", "play hello"))
        assert found["kind"] == "reasoning dropped by the template"
        assert "greets" not in json.dumps(found)
        first, _ = ask(said("user", "play cut"))
        cut = said("assistant", first["choices"][0]["message"]["content"])
        _, found = ask(said("user", "play cut"), cut, said("user", "play hello"))
        assert (found["reason"], list(found["tokens"])) == ("same text, other tokens", ["ours"])
        ask(said("system", "Secret: 11:42:00 abab"), said("user", "play hello"))
        _, found = ask(said("system", "Secret: 11:47:00 abab"), said("user", "play hello"))
        assert (found["reason"], found["kind"]) == ("a line that changes every time", "clock")
        ask(said("system", "You know abcab."), said("user", "play hello"))
        _, found = ask(said("system", "You know abd."), said("user", "play hello"))
        assert found["reason"] == "system changed"


def test_the_line_is_the_clients_own(client: Client) -> None:
    """Without what the template writes on the same line."""
    for day in ("Monday", "Tuesday"):
        answer = chat(client, said("system", f"You help. Today is {day}."), said("user", "play hello"), salt="own")
    assert ended(answer)["line"] == "You help. Today is Tuesday."


def test_a_template_that_looks_into_its_texts_is_explained_less(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }} {{ m.content | length }} {{ m.content }}\n{% endfor %}"
    with server(tmp_path, template) as client:
        for style in ("short", "funny"):
            answer = chat(client, said("system", f"You are {style}."), said("user", "play hello"), salt="length")
        found = ended(answer)
        assert (found["reason"], "part" in found) == ("differs", False)
        assert found["character"] == len("system 14 You are ")
        many = {"temperature": 0, "max_tokens": 1, "cache_salt": "many", "key": "alice"}
        client.ask(TEXT, prompt="a common beginning, and more", **many)
        prompts = [f"a common beginning {i} and so on" for i in range(9)]
        found = client.ask(TEXT, prompt=prompts, **many).json["kvarn"]["prompts"]
        assert {each["reuse_ended"]["reason"] for each in found} == {"differs"}
        assert "character" in found[0]["reuse_ended"]
