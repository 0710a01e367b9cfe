"""Chats with tools: OpenAI's answers, whole and streamed, from a model that writes given texts."""

import json
import re
from collections.abc import Iterator

import jsonschema_rs
import pytest
from support.scripted import (
    HERMES,
    HERMES_CONTROL,
    MISTRAL,
    MISTRAL_CONTROL,
    Client,
    scripted_llm,
    scripted_model,
    serving,
)

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DAYS = {
    "type": "object",
    "properties": {"days": {"type": "integer"}},
    "required": ["days"],
    "additionalProperties": False,
}


def function(name: str, schema: dict, **fields: object) -> dict:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": schema, **fields}}


def written(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


WEATHER, FORECAST = function("weather", CITY), function("forecast", DAYS)
TOOLS = [WEATHER, FORECAST]
OSLO = '{"city": "Oslo"}'
TEXTS = {
    "text": "It is sunny.",
    "call": written("weather", OSLO),
    "said": "I look it up.\n\n" + written("weather", OSLO),
    "two": written("weather", OSLO) + "\n" + written("forecast", '{"days": 3}'),
    "mixed": ["<b>bold</b>", written("weather", OSLO)],
    "unknown": written("stocks", "{}"),
    "broken": '<tool_call>\n{"name": "weather", "arguments": {"city": Oslo}}\n</tool_call>',
    "wrong": written("forecast", '{"days": "three"}'),
    "think": "<think>\nThe user asks.\n</think>\n\n" + written("weather", OSLO),
    "long": written("weather", json.dumps({"city": "x" * 400})),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = scripted_model(tmp_path_factory.mktemp("model") / "tiny.gguf", HERMES, HERMES_CONTROL)
    with serving(scripted_llm(model, TEXTS)) as client:
        yield client


def choices(client: Client, name: str, **fields: object) -> list[dict]:
    """The choices of the whole answer. The stream must have the same parts."""
    reply = client.say(name, **{"tools": TOOLS} | fields)
    assert reply.status == 200, reply.error
    stream = client.say(name, **{"tools": TOOLS} | fields, stream=True)
    found = reply.json["choices"]
    assert [known(choice) for choice in joined(stream.events)] == [known(choice) for choice in found]
    return found


def known(choice: dict) -> tuple:
    """Without ids, which are new each time, and without a call that broke in the stream."""
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return message["content"] or "", message.get("reasoning_content", ""), calls, choice["finish_reason"]


def joined(events: list[dict]) -> list[dict]:
    """The choices of a stream, as OpenAI's clients join them. Checks the form of each delta."""
    found: dict[int, dict] = {}
    for event in events:
        for choice in event["choices"]:
            delta, index = choice["delta"], choice["index"]
            if index not in found:
                assert delta["role"] == "assistant"
                found[index] = {"message": {"content": "", "tool_calls": []}, "finish_reason": None}
            else:
                assert "role" not in delta
                assert len(delta) <= 1
            assert found[index]["finish_reason"] is None, "something came after the end"
            message = found[index]["message"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] = message.get("reasoning_content", "") + delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", []):
                take(message["tool_calls"], call)
            found[index]["finish_reason"] = choice["finish_reason"]
    return [found[index] for index in sorted(found)]


def take(calls: list[dict], delta: dict) -> None:
    if delta["index"] == len(calls):
        assert delta.keys() == {"index", "id", "type", "function"}
        assert delta["type"] == "function"
        assert delta["function"].keys() == {"name", "arguments"}
        assert delta["function"]["arguments"] == ""
        calls.append({"id": delta["id"], "function": dict(delta["function"])})
    else:
        assert delta["index"] == len(calls) - 1, "only the last call grows"
        assert delta.keys() == {"index", "function"}
        assert delta["function"].keys() == {"arguments"}
        assert delta["function"]["arguments"]
        calls[-1]["function"]["arguments"] += delta["function"]["arguments"]


def test_a_call(client: Client) -> None:
    (choice,) = choices(client, "call")
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert re.fullmatch("call_[A-Za-z0-9]{24}", call["id"])
    assert (call["type"], call["function"]) == ("function", {"name": "weather", "arguments": OSLO})


def test_text_needs_no_call(client: Client) -> None:
    (choice,) = choices(client, "text")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("It is sunny.", "stop")
    assert "tool_calls" not in choice["message"]
    assert choices(client, "call", tools=[])[0]["message"]["content"] == TEXTS["call"], "without tools it is text"


def test_text_before_a_call(client: Client) -> None:
    (choice,) = choices(client, "said")
    assert choice["message"]["content"] == "I look it up."
    assert len(choice["message"]["tool_calls"]) == 1


def test_several_calls_or_one(client: Client) -> None:
    (choice,) = choices(client, "two")
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather", "forecast"]
    (choice,) = choices(client, "two", parallel_tool_calls=False)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]


def test_a_named_function_is_called_once(client: Client) -> None:
    (choice,) = choices(client, "two", tool_choice={"type": "function", "function": {"name": "weather"}})
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == [OSLO]


def test_each_choice_has_its_own_calls(client: Client) -> None:
    text, call = choices(client, "mixed", n=2)
    assert (text["message"]["content"], text["finish_reason"]) == ("<b>bold</b>", "stop")
    assert (call["message"]["content"], call["finish_reason"]) == (None, "tool_calls")


@pytest.mark.parametrize("name", ["text", "unknown", "broken", "wrong", "long"])
@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "forecast"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [FORECAST]}},
    ],
    ids=["required", "named", "allowed"],
)
def test_a_required_call_is_valid_whatever_the_model_prefers(client: Client, name: str, choice: object) -> None:
    (found,) = choices(client, name, tool_choice=choice)
    assert found["finish_reason"] == "tool_calls"
    schemas = {"weather": CITY, "forecast": DAYS}
    for call in found["message"]["tool_calls"]:
        called, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        jsonschema_rs.validate(schemas[called], arguments)
        assert choice == "required" or called == "forecast"


def test_tool_choice_none_is_text(client: Client) -> None:
    (choice,) = choices(client, "call", tool_choice="none")
    assert (choice["message"]["content"], choice["finish_reason"]) == (TEXTS["call"], "stop")


def test_only_allowed_tools_are_called(client: Client) -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [FORECAST]}}
    reply = client.say("call", tools=TOOLS, tool_choice=allowed).json
    assert reply["choices"][0]["message"]["content"] == TEXTS["call"]
    assert "'weather'" in reply["kvarn"]["tool_parse_error"]


def test_the_arguments_of_a_strict_tool_follow_its_schema(client: Client) -> None:
    loose = choices(client, "wrong")[0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert loose == '{"days": "three"}', "without strict, the model's own"
    strict = choices(client, "wrong", tools=[function("forecast", DAYS, strict=True)])
    jsonschema_rs.validate(DAYS, json.loads(strict[0]["message"]["tool_calls"][0]["function"]["arguments"]))
    assert choices(client, "text", tools=[function("forecast", DAYS, strict=True)])[0]["finish_reason"] == "stop"


@pytest.mark.parametrize("name", ["unknown", "broken"])
def test_a_malformed_call_is_text(client: Client, name: str) -> None:
    reply = client.say(name, tools=TOOLS).json
    assert reply["choices"][0]["message"]["content"] == TEXTS[name]
    assert "tool_calls" not in reply["choices"][0]["message"]
    assert reply["choices"][0]["finish_reason"] == "stop"
    error = reply["kvarn"]["tool_parse_error"]
    assert "\n" not in error
    events = client.say(name, tools=TOOLS, stream=True).events
    assert events[-1]["kvarn"]["tool_parse_error"] == error
    assert joined(events)[0]["message"]["content"] == TEXTS[name]
    assert "tool_parse_error" not in client.say("call", tools=TOOLS).json["kvarn"]


def test_a_call_that_is_cut_off_is_no_call(client: Client) -> None:
    reply = client.say("call", tools=TOOLS, max_tokens=60).json
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == TEXTS["call"][:60]
    assert "the text ends" in reply["kvarn"]["tool_parse_error"]
    events = client.say("call", tools=TOOLS, max_tokens=60, stream=True).events
    assert joined(events)[0]["finish_reason"] == "length"


def test_a_stop_text_ends_the_answer_before_a_call(client: Client) -> None:
    (choice,) = choices(client, "said", stop=["up."])
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look it ", "stop")


def test_reasoning_before_a_call(client: Client) -> None:
    (choice,) = choices(client, "think")
    assert choice["message"]["reasoning_content"] == "The user asks."
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    (choice,) = choices(client, "think", tool_choice="required")
    assert choice["message"]["reasoning_content"] == "The user asks.", "a required call may come after reasoning"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == OSLO


def test_logprobs_of_every_token(client: Client) -> None:
    reply = client.say("said", tools=TOOLS, logprobs=True).json
    n = reply["usage"]["completion_tokens"]
    assert len(reply["choices"][0]["logprobs"]["content"]) == n
    events = client.say("said", tools=TOOLS, logprobs=True, stream=True).events
    each = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
    assert sum(len(logprobs["content"]) for logprobs in each) == n


def test_usage_in_every_chunk(client: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = client.say("two", tools=TOOLS, stream=True, stream_options=options).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert events[-1]["choices"] == []
    assert counts[-1] == len(TEXTS["two"]) + 1


def test_several_at_a_time_are_as_alone(client: Client) -> None:
    bodies = [
        {
            "messages": [{"role": "user", "content": f"play {name}"}],
            "temperature": 0,
            "tools": TOOLS,
            "tool_choice": choice,
        }
        for name in ("text", "call", "two", "wrong")
        for choice in ("auto", "required")
    ]
    together = [known(reply.json["choices"][0]) for reply in client.together(bodies)]
    assert together == [known(client.ask(**body).json["choices"][0]) for body in bodies]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_client_that_leaves_in_a_call_frees_its_blocks(client: Client, choice: str) -> None:
    client.say("long", tools=TOOLS, tool_choice=choice, stream=True, leave_at=20)
    client.until(lambda: not client.llm.engine.busy)
    assert client.llm.cache.usage().sequences == 0


REFUSED = {
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools", "tools[0].function.name is missing"),
    "no function": ({"tools": [{"type": "function"}]}, "tools", "tools[0] is not a function"),
    "a name with a quote": ({"tools": [function('a"b', CITY)]}, "tools", "letters and digits of ASCII, _, - and ."),
    "two of one name": ({"tools": [WEATHER, WEATHER]}, "tools", "two functions of one name"),
    "no schema": ({"tools": [function("f", [])]}, "tools", "tools[0].function.parameters is []"),
    "no object": ({"tools": [function("f", {"type": "string"})]}, "tools", "parameters.type is 'string'"),
    "required, no tools": ({"tool_choice": "required"}, "tool_choice", "there is no function to call"),
    "required, other tools": (
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        "tool_choice",
        "there is no function to call",
    ),
    "a name that is not there": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        "names 'x', which is not one of tools",
    ),
    "a wrong choice": ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "tool_choice is"),
    "a choice without a type": ({"tools": TOOLS, "tool_choice": {}}, "tool_choice", "tool_choice must be"),
    "a wrong mode": (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}},
        "tool_choice",
        "mode must be auto or required",
    ),
    "a schema that cannot be enforced": (
        {"tools": [function("f", {"type": "object", "properties": {"a": {"not": {}}}})], "tool_choice": "required"},
        "tools",
        "not",
    ),
    "legacy functions": ({"functions": [{"name": "f"}]}, "functions", "functions is not implemented"),
    "legacy function_call": ({"function_call": {"name": "f"}}, "function_call", "function_call is not implemented"),
}


def test_what_has_no_effect_is_reported(client: Client) -> None:
    tools = [{**WEATHER, "cache_control": {}, "foo": 1}, FORECAST]
    call = {"id": "a", "index": 0, "type": "function", "function": {"name": "weather", "arguments": OSLO}}
    history = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": "a", "content": "rain"}]
    format = {"type": "json_object"}
    always = ["tools[0].foo"]
    for fields, told in (
        ({}, []),
        ({"stop": "Oslo"}, []),
        ({"stop": "Oslo", "tool_choice": "required"}, ["stop"]),
        ({"stop": ["Oslo"], "parallel_tool_calls": False}, ["stop"]),
        ({"stop": [], "response_format": format}, []),
        ({"stop": "Oslo", "response_format": format}, ["stop"]),
        ({"response_format": format, "tool_choice": "required"}, ["response_format"]),
    ):
        reply = client.say("call", tools=tools, max_tokens=8, **fields)
        assert reply.json["kvarn"]["ignored"] == [*always, *told], reply.error
    messages = [{"role": "user", "content": "play text"}, *history, {"role": "user", "content": "play text"}]
    reply = client.say("text", tools=TOOLS, messages=messages)
    assert reply.json["kvarn"]["ignored"] == ["messages[1].tool_calls[0].index"], reply.error


def test_arguments_of_earlier_calls_are_characters(client: Client) -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "\\ud800"}'}}]
    history = [{"role": "user", "content": "play text"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    reply = client.say("text", tools=TOOLS, messages=history)
    assert reply.status == 400
    assert reply.json["error"]["param"] == "messages"
    assert "messages[1].tool_calls: the arguments of a call have half of a surrogate pair" in reply.error


def test_a_variable_may_have_any_name(client: Client) -> None:
    reply = client.say("text", chat_template_kwargs={"self": 1})
    assert reply.status == 200, reply.error
    assert reply.json["kvarn"]["ignored"] == ["chat_template_kwargs.self"]


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(client: Client, case: str) -> None:
    fields, param, message = REFUSED[case]
    reply = client.say("text", **fields)
    assert reply.status == 400
    assert reply.json["error"]["param"] == param
    assert message in reply.error
    assert "\n" not in reply.error


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    texts = {
        "call": f"[TOOL_CALLS]weather[ARGS]{OSLO}",
        "stray": "It is [ARGS]sunny[OTHER].",
        "broken": "[TOOL_CALLS]stocks[ARGS]{}",
    }
    model = scripted_model(tmp_path_factory.mktemp("model") / "tiny.gguf", MISTRAL, MISTRAL_CONTROL)
    with serving(scripted_llm(model, texts)) as client:
        yield client


def test_markers_that_are_control_tokens(marked: Client) -> None:
    (choice,) = choices(marked, "call")
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": OSLO}
    assert re.fullmatch("[A-Za-z0-9]{9}", call["id"])
    (choice,) = choices(marked, "stray", tools=[WEATHER], tool_choice="required")
    jsonschema_rs.validate(CITY, json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]))


def test_control_tokens_are_not_content(marked: Client) -> None:
    assert marked.say("stray").json["choices"][0]["message"]["content"] == "It is sunny."
    assert choices(marked, "stray")[0]["message"]["content"] == "It is sunny."
    assert marked.say("call").json["choices"][0]["message"]["content"] == f"weather{OSLO}", "as without tools before"
    assert choices(marked, "broken")[0]["message"]["content"] == "stocks{}"
