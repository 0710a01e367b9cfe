"""Anthropic's /v1/messages: answers and their events, from a model that writes given texts."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from support.scripted import HERMES, HERMES_CONTROL, Client, scripted_llm, scripted_model, serving
from support.serving import Reply

from kvarn.server.access import Access

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": CITY}
STOCKS = {"name": "stocks", "input_schema": {"type": "object", "properties": {}}}


def written(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


OSLO = '{"city": "Oslo"}'
TEXTS = {
    "text": "It is sunny.",
    "call": written("weather", OSLO),
    "said": "I look it up.\n\n" + written("weather", OSLO),
    "two": written("weather", OSLO) + "\n" + written("stocks", "{}"),
    "think": "<think>\nThe user asks.\n</think>\n\nIt rains.",
    "plan": "<think>\nI ask.\n</think>\n\n" + written("weather", OSLO),
    "unknown": written("bonds", "{}"),
    "broken": '<tool_call>\n{"name": "weather", "arguments": {"city": Oslo}}\n</tool_call>',
    "nothing": "",
    "bold": "é<b>bold</b> 1, 2, 3, 4",
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = scripted_model(tmp_path_factory.mktemp("model") / "tiny.gguf", HERMES, HERMES_CONTROL)
    with serving(scripted_llm(model, TEXTS, block_size=16), Access(["alice", "bob"])) as client:
        yield client


def user(content: Any) -> dict:
    return {"role": "user", "content": content}


def ask(client: Client, *messages: dict, key: str = "alice", path: str = PATH, **fields: Any) -> Reply:
    body = {"messages": list(messages), "max_tokens": 200, "temperature": 0} | fields
    return client.ask(path, key=key, **body)


def events(reply: Reply) -> list[dict]:
    """Each event is named by its own type."""
    frames = reply.body.decode().split("\n\n")
    assert frames.pop() == ""
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(found: list[dict]) -> dict:
    """The message of a stream, as Anthropic's clients join it. Checks the order of the events."""
    (start, ping), blocks, (delta, stop) = found[:2], found[2:-2], found[-2:]
    assert (start["type"], ping, stop) == ("message_start", {"type": "ping"}, {"type": "message_stop"})
    message, arguments, opened = copy.deepcopy(start["message"]), "", None
    assert (message["content"], message["stop_reason"]) == ([], None)
    for event in blocks:
        match event["type"]:
            case "content_block_start":
                assert opened is None
                opened, arguments = event["index"], ""
                assert opened == len(message["content"])
                message["content"].append(copy.deepcopy(event["content_block"]))
            case "content_block_delta":
                assert event["index"] == opened
                block, change = message["content"][-1], event["delta"]
                assert list(change.values())[1], "no delta is empty"
                if change["type"] == "input_json_delta":
                    arguments += change["partial_json"]
                else:
                    key = change["type"].removesuffix("_delta")
                    block[key] += change[key]
            case "content_block_stop":
                assert event["index"] == opened
                if message["content"][-1]["type"] == "tool_use" and arguments:
                    message["content"][-1]["input"] = json.loads(arguments)
                opened = None
    assert opened is None
    assert delta["type"] == "message_delta"
    usage = message["usage"] | delta["usage"]
    assert {k: v for k, v in message["usage"].items() if k != "output_tokens"}.items() <= delta["usage"].items()
    return message | delta["delta"] | {"usage": usage, "kvarn": delta["kvarn"]}


def known(message: dict) -> dict:
    """Without what is new each time: ids, and what the cache did."""
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {k: message[k] for k in ("type", "role", "model", "stop_reason", "stop_sequence")} | {"content": content}


def said(client: Client, name: str, **fields: Any) -> dict:
    """The whole answer. The stream must have the same parts."""
    reply = ask(client, user(f"play {name}"), **fields)
    assert reply.status == 200, reply.body
    stream = ask(client, user(f"play {name}"), stream=True, **fields)
    assert stream.headers["content-type"].startswith("text/event-stream")
    message = joined(events(stream))
    assert known(message) == known(reply.json)
    assert message["usage"]["output_tokens"] == reply.json["usage"]["output_tokens"]
    return reply.json


def test_a_text(client: Client) -> None:
    found = said(client, "text")
    assert found["id"].startswith("msg_")
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "tiny")
    assert found["content"] == [{"type": "text", "text": "It is sunny."}]
    assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)


def test_an_answer_without_text_has_an_empty_block(client: Client) -> None:
    assert said(client, "nothing")["content"] == [{"type": "text", "text": ""}]


def test_calls(client: Client) -> None:
    tools = [WEATHER, STOCKS]
    found = said(client, "two", tools=tools)
    assert [(b["type"], b["name"], b["input"]) for b in found["content"]] == [
        ("tool_use", "weather", {"city": "Oslo"}),
        ("tool_use", "stocks", {}),
    ]
    assert found["stop_reason"] == "tool_use"
    found = said(client, "said", tools=tools)
    assert [block["type"] for block in found["content"]] == ["text", "tool_use"]


def test_thinking(client: Client) -> None:
    thought, text = said(client, "think")["content"]
    assert (thought["type"], thought["thinking"], text["text"]) == ("thinking", "The user asks.", "It rains.")
    assert thought["signature"]
    kinds = [block["type"] for block in said(client, "plan", tools=[WEATHER])["content"]]
    assert kinds == ["thinking", "tool_use"]
    hidden = said(client, "think", thinking={"type": "disabled"})["content"]
    assert [block["type"] for block in hidden] == ["text"]


def test_what_is_no_call_is_text(client: Client) -> None:
    for name in ("unknown", "broken"):
        reply = ask(client, user(f"play {name}"), tools=[WEATHER])
        assert [block["type"] for block in reply.json["content"]] == ["text"], name
        assert reply.json["stop_reason"] == "end_turn"
        assert reply.json["kvarn"]["tool_parse_error"]
        found = events(ask(client, user(f"play {name}"), tools=[WEATHER], stream=True))
        assert found[-2]["delta"]["stop_reason"] == "end_turn", "no client runs a call that broke"


def test_why_it_ends(client: Client) -> None:
    found = said(client, "bold", stop_sequences=["3,", "never"])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "3,")
    assert found["content"][0]["text"] == "é<b>bold</b> 1, 2, "
    assert said(client, "bold", max_tokens=5)["stop_reason"] == "max_tokens"
    assert said(client, "text", max_tokens=100_000)["stop_reason"] == "end_turn", "a limit, not a reservation"


def test_choices_of_tools(client: Client) -> None:
    tools = [WEATHER, STOCKS]
    assert said(client, "text", tools=tools, tool_choice={"type": "none"})["stop_reason"] == "end_turn"
    found = said(client, "two", tools=tools, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["name"] for block in found["content"]] == ["weather"]
    found = ask(client, user("play two"), tools=tools, tool_choice={"type": "tool", "name": "stocks"}).json
    assert [block["name"] for block in found["content"]] == ["stocks"]
    found = ask(client, user("play text"), tools=tools, tool_choice={"type": "any"}).json
    assert found["stop_reason"] in ("tool_use", "max_tokens")
    assert found["content"][0]["type"] in ("tool_use", "text")


def test_a_structure(client: Client) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    for fields in ({"output_format": form}, {"output_config": {"format": form}}):
        text = said(client, "text", max_tokens=60, **fields)["content"][0]["text"]
        assert text.startswith("{")
    reply = ask(client, user("play text"), output_format={"type": "json_schema", "schema": {"type": "no"}})
    assert (reply.status, reply.error.split(":")[0]) == (400, "output_format")


def prompt_of(client: Client, body: dict) -> int:
    reply = client.ask("/tokenize", key="alice", **body)
    assert reply.status == 200, reply.body
    return reply.json["count"]


def test_history_is_what_the_chat_endpoint_makes_of_it(client: Client) -> None:
    """Blocks of calls, results and thinking are the same tokens as OpenAI's messages."""
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]}
    turns = [
        user("play text"),
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, call]},
        user([result, {"type": "text", "text": "play text"}]),
    ]
    function = {"name": "weather", "description": "of a city", "parameters": CITY}
    spoken = [
        {"role": "system", "content": "Be\nbrief."},
        user("play text"),
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "weather", "arguments": OSLO}}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        user("play text"),
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    n = prompt_of(client, {"messages": spoken, "tools": [{"type": "function", "function": function}]})
    assert ask(client, *turns, path=COUNT, system=system, tools=[WEATHER]).json == {"input_tokens": n}
    first = ask(client, *turns, system=system, tools=[WEATHER]).json
    body = {"messages": spoken, "tools": [{"type": "function", "function": function}], "max_tokens": 20}
    second = client.ask(key="alice", **body).json["kvarn"]
    assert second["reused_tokens"] == second["prompt_tokens"] - 1 == sum_of(first) - 1
    merged = ask(client, user("play"), user("text"), path=COUNT).json
    assert merged == ask(client, user("play\ntext"), path=COUNT).json, "turns of one role are one turn"
    error = ask(client, *turns[:2], user([result | {"is_error": True}]), path=COUNT).json["input_tokens"]
    assert error == ask(client, *turns[:2], user([result]), path=COUNT).json["input_tokens"] + len("Error: ")


def sum_of(message: dict) -> int:
    return sum(message["usage"][k] for k in message["usage"] if k.endswith("input_tokens"))


def test_usage_says_what_the_cache_did(client: Client) -> None:
    question = user("play text " + "and a word " * 20)
    fields: dict = {"cache_salt": "usage"}
    n = ask(client, question, path=COUNT).json["input_tokens"]
    first = ask(client, question, **fields).json
    full = n - n % 16
    assert first["usage"] == {
        "input_tokens": n - full,
        "cache_creation_input_tokens": full,
        "cache_read_input_tokens": 0,
        "output_tokens": len("It is sunny.") + 1,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    second = ask(client, question, **fields).json
    assert second["usage"]["cache_read_input_tokens"] == n - 1 == second["kvarn"]["reused_tokens"]
    assert sum_of(second) == n
    stream = joined(events(ask(client, question, stream=True, **fields)))
    assert stream["usage"] == second["usage"]


def test_cache_control_is_a_priority_and_changes_no_answer(client: Client) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    marked = ask(
        client,
        user([{"type": "text", "text": "play text", **mark}]),
        system=[{"type": "text", "text": "Be brief.", **mark}],
        tools=[WEATHER | mark],
        **mark,
    ).json
    plain = ask(client, user("play text"), system="Be brief.", tools=[WEATHER]).json
    assert known(marked) == known(plain)
    assert plain["usage"]["cache_read_input_tokens"] == sum_of(plain) - 1, "the same tokens"
    assert "ignored" not in marked["kvarn"]


def test_what_agents_send_is_accepted_and_told(client: Client) -> None:
    tools = [
        WEATHER | {"eager_input_streaming": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
    ]
    reply = ask(
        client,
        user([{"type": "text", "text": "play text", "citations": []}]),
        tools=tools,
        thinking={"type": "enabled", "budget_tokens": 1024},
        context_management={"edits": []},
        metadata={"user_id": "u"},
        service_tier="auto",
        system=[{"type": "text", "text": "Be brief.", "citations": {"enabled": True}}],
    )
    assert reply.json["kvarn"]["ignored"] == [
        "context_management",
        "thinking.budget_tokens",
        "tools[0].eager_input_streaming",
        "tools[1] (web_search_20250305)",
        "tools[2] (bash_20250124)",
        "system[0].citations",
        "messages[0].content[0].citations",
    ]
    assert reply.headers["x-kvarn-ignored"].startswith("context_management, ")
    assert 'field="tools.web_search"' in client.metrics()


def test_thinking_is_a_switch_of_the_template(client: Client) -> None:
    plain = ask(client, user("play text"), path=COUNT).json["input_tokens"]
    off = ask(client, user("play text"), path=COUNT, thinking={"type": "disabled"}).json["input_tokens"]
    on = ask(client, user("play text"), path=COUNT, thinking={"type": "adaptive"}).json["input_tokens"]
    assert (off - plain, on) == (len("<think>\n\n</think>\n\n"), plain)


def test_a_conversation_that_is_too_long_is_counted(client: Client) -> None:
    """Clients count to find out whether it fits."""
    long = user("word " * 5000)
    assert ask(client, long).status == 400
    assert ask(client, long, path=COUNT).json["input_tokens"] > client.llm.cache.longest


def test_nothing_to_answer(client: Client) -> None:
    for messages in ([], [{"role": "user", "content": []}]):
        reply = ask(client, *messages, system="Be brief.")
        assert (reply.status, "messages has no turn" in reply.json["error"]["message"]) == (400, True)


def test_diagnostics(client: Client) -> None:
    def turn(*messages: dict, previous: str | None, **fields: Any) -> dict:
        fields |= {"diagnostics": {"previous_message_id": previous}, "cache_salt": "diagnostics"}
        whole = ask(client, *messages, **fields).json
        again = joined(events(ask(client, *messages, stream=True, **fields)))
        assert "cache_miss_reason" in again["diagnostics"]
        return whole

    def reason(message: dict) -> Any:
        return message["diagnostics"]["cache_miss_reason"]

    question = user("play text " + "word " * 30)
    first = turn(question, previous=None, system="Be brief.", tools=[WEATHER])
    assert reason(first) is None
    talk = [question, {"role": "assistant", "content": first["content"]}, user("play text")]
    assert reason(turn(*talk, previous=first["id"], system="Be brief.", tools=[WEATHER])) is None
    changed = turn(*talk, previous=first["id"], system="Be kind.", tools=[WEATHER])
    assert reason(changed)["type"] == "system_changed"
    assert reason(changed)["cache_missed_input_tokens"] > 100
    assert reason(turn(*talk, previous=first["id"], system="Be brief.", tools=[STOCKS]))["type"] == "tools_changed"
    other = [user("play text " + "other " * 30), *talk[1:]]
    found = reason(turn(*other, previous=first["id"], system="Be brief.", tools=[WEATHER]))
    assert found["type"] == "messages_changed"
    lost = turn(question, previous="msg_none")
    assert reason(lost) == {"type": "previous_message_not_found"}
    assert "diagnostics" not in ask(client, question).json
    stolen = ask(client, question, key="bob", diagnostics={"previous_message_id": first["id"]}).json
    assert reason(stolen) == {"type": "previous_message_not_found"}, "another key's message"


def test_it_is_explained_by_its_id(client: Client) -> None:
    found = ask(client, user("play text")).json
    stored = client.get(f"/kvarn/requests/{found['id']}", key="alice").json
    assert stored["prompt_tokens"] == sum_of(found)
    assert client.get(f"/kvarn/requests/{found['id']}", key="bob").status == 404


WRONG: list[tuple[dict, str]] = [
    ({"messages": 3}, "messages is 3; it must be an array"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    ({"messages": [{"role": "robot", "content": ""}]}, 'messages[0].role is "robot"; it must be one of'),
    ({"messages": [user([{"type": "text"}])]}, "messages[0].content[0].text is missing"),
    ({"messages": [user([{"text": "a"}])]}, "messages[0].content[0].type is missing"),
    ({"messages": [user([{"type": "image", "source": {}}])]}, "messages[0].content[0]: image input is not supported"),
    ({"messages": [user([{"type": "document"}])]}, "messages[0].content[0]: document input is not supported"),
    ({"messages": [user([{"type": "search_result"}])]}, "blocks of type search_result are not implemented"),
    ({"messages": [user([{"type": "tool_result", "content": "a"}])]}, "messages[0].content[0].tool_use_id is missing"),
    (
        {"messages": [user([{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}])]},
        "messages[0].content[0].content: image input is not supported",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}, user("c")]},
        "messages[0].content[0].input is missing",
    ),
    ({"messages": [user("a"), {"role": "assistant", "content": " "}]}, "messages end with a turn of the assistant"),
    ({"system": [{"type": "image"}]}, "system: image input is not supported"),
    ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema is missing"),
    ({"tools": [WEATHER, WEATHER]}, "tools has two functions of one name"),
    ({"tool_choice": "auto"}, 'tool_choice is "auto"; it must be an object'),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
    ({"tool_choice": {"type": "any"}}, "tool_choice asks for a call and there is no function to call"),
    ({"thinking": {"type": "maybe"}}, 'thinking.type is "maybe"'),
    ({"stop_sequences": "a"}, 'stop_sequences is "a"; it must be an array'),
    ({"mood": "good"}, "mood is not implemented here: leave it out"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_wrong_fields_are_named(client: Client, fields: dict, message: str) -> None:
    for stream in (False, True):
        reply = ask(client, **{"messages": [user("play text")]} | fields, stream=stream)
        found = reply.json
        assert (reply.status, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error")
        assert message in found["error"]["message"]
        assert found["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]


def test_other_errors_have_the_same_form(client: Client) -> None:
    reply = client.ask(PATH, key="mallory", messages=[user("play text")], max_tokens=1)
    assert (reply.status, reply.json["error"]["type"]) == (401, "authentication_error")
    reply = ask(client, user("x" * 5000))
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    assert "shorten the prompt" in reply.error
    reply = ask(client, user("x" * (9 << 20)))
    assert (reply.status, reply.json["error"]["type"]) == (413, "request_too_large")


FULL = {
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        user([{"type": "text", "text": "play call"}]),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        user([{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]}]),
        user("play text"),
    ],
    "tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 9},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": CITY}},
    "metadata": {"user_id": "a"},
    "diagnostics": {"previous_message_id": None},
    "stop_sequences": ["x"],
    "cache_control": {"type": "ephemeral"},
    "max_tokens": 20,
}
ODD: list[Any] = [
    *(None, True, 0, -1, 2**70, 0.5, 1e400, "", "a", "<|im_end|>", "\ud7ff\u0000", "auto", [], {}, [[]], [None]),
    *({"type": "text"}, {"type": "tool_use"}, {"type": []}, {"type": "object"}, {"$ref": "#"}, "x" * 999),
]


def test_no_request_gets_a_500(client: Client) -> None:
    choose, answered = random.Random(19), 0
    for case in range(200):
        body: Any = copy.deepcopy(FULL)
        for name in choose.sample(sorted(body.keys() - {"messages"}), choose.randrange(6)):
            del body[name]
        for _ in range(choose.randrange(1, 3)):
            inner, path = body, []
            while isinstance(inner, dict | list) and inner and (not path or choose.random() < 0.8):
                key = choose.choice(list(inner)) if isinstance(inner, dict) else choose.randrange(len(inner))
                path, outer, inner = [*path, key], inner, inner[key]
            outer[path[-1]] = choose.choice(ODD)
        reply = client.ask(choose.choice([PATH, PATH, COUNT]), key="alice", **body)
        assert reply.status in (200, 400), (case, reply.body, body)
        answered += reply.status == 200
        assert reply.status == 200 or "\n" not in reply.json["error"]["message"]
    assert 20 < answered < 180, "both kinds of requests were tried"


def test_a_body_that_is_nested_deeply(client: Client) -> None:
    deep: Any = "a"
    for _ in range(900):
        deep = {"a": deep}
    call = {"type": "tool_use", "id": "t", "name": "weather", "input": deep}
    for fields in ({"tools": [WEATHER | {"input_schema": deep}]}, {"metadata": deep}, {"context_management": deep}):
        assert ask(client, user("play text"), **fields).status in (200, 400)
    assert ask(client, user("a"), {"role": "assistant", "content": [call]}, user("play text")).status in (200, 400)
