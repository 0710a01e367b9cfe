"""Reasoning and structured answers over HTTP: where the structure begins, and what is refused."""

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator

import jsonschema_rs
import pytest
from support.scripted import HERMES, HERMES_CONTROL, TEXT, Client, Reply, scripted_llm, scripted_model, serving

from kvarn.server.structures import MOST
from kvarn.structured import Compiled, Structure

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OSLO = '{"city": "Oslo"}'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "Rain, or sun?"
TEXTS = {
    "text": "It is sunny.",
    "json": OSLO,
    "think": f"<think>\n{THOUGHT}\n</think>\n\nIt is sunny.",
    "thinkjson": f"<think>\n{THOUGHT}\n</think>\n\n{OSLO}",
    "thinks": f"{THOUGHT}\n</think>\n\n{OSLO}",  # after a prompt that opens reasoning
    "endless": f"<think>\n{THOUGHT * 50}",
    "call": CALL,
    "thinkcall": f"<think>\n{THOUGHT}\n</think>\n\n{CALL}",
}
OPEN = {"chat_template_kwargs": {"open": True}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": CITY}}
STRUCTURES = {
    "json_schema": {"response_format": SCHEMA},
    "json_object": {"response_format": {"type": "json_object"}},
    "json_object with a schema": {"response_format": {"type": "json_object", "schema": CITY}},
    "structured_outputs json": {"structured_outputs": {"json": CITY}},
    "llama.cpp's json_schema": {"json_schema": CITY},
    "structured_outputs regex": {"structured_outputs": {"regex": r"\{\"city\": \"[A-Z][a-z]+\"\}"}},
    "structured_outputs choice": {"structured_outputs": {"choice": [OSLO, '{"city": "Rome"}']}},
    "GBNF": {"grammar": 'root ::= "{\\"city\\": \\"" [A-Za-z]+ "\\"}"'},
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = scripted_model(tmp_path_factory.mktemp("model") / "tiny.gguf", HERMES, HERMES_CONTROL)
    with serving(scripted_llm(model, TEXTS)) as client:
        yield client


def message(reply: Reply) -> dict:
    assert reply.status == 200, reply.error
    return reply.json["choices"][0]["message"]


def streamed(client: Client, name: str, **fields: object) -> tuple[str, str]:
    """Reasoning and content of a stream."""
    deltas = [c["delta"] for event in client.say(name, stream=True, **fields).events for c in event["choices"]]
    return tuple("".join(delta.get(key) or "" for delta in deltas) for key in ("reasoning_content", "content"))


# -- reasoning -------------------------------------------------------------------------------------------------------


def test_reasoning_is_apart_from_the_text(client: Client) -> None:
    reply = client.say("think")
    assert message(reply)["reasoning_content"] == THOUGHT
    assert message(reply)["content"] == "It is sunny."
    assert streamed(client, "think") == (THOUGHT, "It is sunny.")
    details = reply.json["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len(f"<think>\n{THOUGHT}\n</think>")}
    plain = client.say("text").json
    assert "reasoning_content" not in plain["choices"][0]["message"]
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_stream_counts_the_same_reasoning(client: Client) -> None:
    whole = client.say("think", n=2).json["usage"]
    last = client.say("think", n=2, stream=True, stream_options={"include_usage": True}).events[-1]["usage"]
    assert last["completion_tokens_details"] == whole["completion_tokens_details"]


def test_reasoning_that_the_prompt_opens(client: Client) -> None:
    found = message(client.say("thinks", **OPEN))
    assert (found["reasoning_content"], found["content"]) == (THOUGHT, OSLO)
    assert streamed(client, "thinks", **OPEN) == (THOUGHT, OSLO)


def test_reasoning_that_never_ends(client: Client) -> None:
    reply = client.say("endless", max_tokens=100)
    assert message(reply)["reasoning_content"] == TEXTS["endless"][:100].removeprefix("<think>\n")
    assert message(reply)["content"] == ""
    assert reply.json["choices"][0]["finish_reason"] == "length"
    assert reply.json["usage"]["completion_tokens_details"]["reasoning_tokens"] == 100


def test_reasoning_in_the_text_or_left_out(client: Client) -> None:
    kept = message(client.say("think", reasoning_format="none"))
    assert (kept["content"], "reasoning_content" in kept) == (TEXTS["think"], False)
    dropped = message(client.say("think", include_reasoning=False))
    assert (dropped["content"], "reasoning_content" in dropped) == ("It is sunny.", False)
    assert streamed(client, "think", include_reasoning=False) == ("", "It is sunny.")


@pytest.mark.parametrize("name", ["think", "text", "endless"])
def test_reasoning_that_is_left_out_has_no_logprobs(client: Client, name: str) -> None:
    fields = {"logprobs": True, "max_tokens": 200}
    every = client.say(name, **fields).json
    n = every["usage"]["completion_tokens_details"]["reasoning_tokens"]
    wanted = every["choices"][0]["logprobs"]["content"][n:]
    left = client.say(name, **fields, include_reasoning=False).json
    assert left["choices"][0]["logprobs"]["content"] == wanted
    events = client.say(name, **fields, include_reasoning=False, stream=True).events
    found = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
    assert [entry for each in found for entry in each["content"]] == wanted


# -- structures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["json", "text"])
@pytest.mark.parametrize("kind", STRUCTURES)
def test_an_answer_follows_its_structure(client: Client, kind: str, name: str) -> None:
    reply = client.say(name, **STRUCTURES[kind], max_tokens=200)
    assert reply.json["choices"][0]["finish_reason"] == "stop", reply.body
    content = message(reply)["content"]
    assert isinstance(json.loads(content), dict)
    if kind != "json_object":
        jsonschema_rs.validate(CITY, json.loads(content))
    assert content == OSLO or name != "json", "the text that the model prefers, if it is valid"
    assert streamed(client, name, **STRUCTURES[kind]) == ("", content)


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize(
    ("name", "fields", "thought"),
    [("thinkjson", {}, THOUGHT), ("thinks", OPEN, THOUGHT), ("json", OFF, "")],
    ids=["written by the model", "opened by the prompt", "closed by the prompt"],
)
def test_a_structure_begins_after_reasoning(client: Client, kind: str, name: str, fields: dict, thought: str) -> None:
    found = message(client.say(name, **STRUCTURES[kind], **fields))
    assert (found.get("reasoning_content", ""), found["content"]) == (thought, OSLO)


def test_no_reasoning_where_the_prompt_has_closed_it(client: Client) -> None:
    found = message(client.say("thinkjson", response_format=SCHEMA, **OFF))
    jsonschema_rs.validate(CITY, json.loads(found["content"]))
    assert "reasoning_content" not in found


def test_a_structure_of_a_completion(client: Client) -> None:
    for fields in STRUCTURES.values():
        reply = client.ask(TEXT, prompt=["play text", "play json"], temperature=0, max_tokens=200, **fields)
        texts = [choice["text"] for choice in reply.json["choices"]]
        assert all(isinstance(json.loads(text), dict) for text in texts), texts
        assert texts[1] == OSLO


def test_a_structure_that_is_cut_off_says_length(client: Client) -> None:
    reply = client.say("json", response_format=SCHEMA, max_tokens=5)
    assert (message(reply)["content"], reply.json["choices"][0]["finish_reason"]) == (OSLO[:5], "length")


def test_stop_texts_do_not_cut_a_structure(client: Client) -> None:
    assert message(client.say("json", response_format=SCHEMA, stop=["Os"]))["content"] == OSLO


def test_each_choice_follows_the_structure(client: Client) -> None:
    reply = client.say("text", response_format=SCHEMA, n=3, temperature=1, seed=1, max_tokens=400).json
    for choice in reply["choices"]:
        if choice["finish_reason"] == "stop":
            jsonschema_rs.validate(CITY, json.loads(choice["message"]["content"]))
    assert any(choice["finish_reason"] == "stop" for choice in reply["choices"])


@pytest.mark.parametrize("name", ["text", "json", "call", "thinkjson", "thinkcall"])
def test_a_structure_beside_tools(client: Client, name: str) -> None:
    """The answer is a call, or follows the structure."""
    reply = client.say(name, response_format=SCHEMA, tools=[WEATHER])
    found, finish = message(reply), reply.json["choices"][0]["finish_reason"]
    assert found.get("reasoning_content", "") == (THOUGHT if name.startswith("think") else "")
    if "call" in name:
        assert (found["tool_calls"][0]["function"]["arguments"], finish) == (OSLO, "tool_calls")
    else:
        jsonschema_rs.validate(CITY, json.loads(found["content"]))
        assert finish == "stop"
    required = message(client.say(name, response_format=SCHEMA, tools=[WEATHER], tool_choice="required"))
    jsonschema_rs.validate(CITY, json.loads(required["tool_calls"][0]["function"]["arguments"]))


REFUSED = {
    "a type": ({"response_format": {"type": "xml"}}, "response_format", "response_format.type is 'xml'"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format", "response_format.json_schema"),
    "a keyword": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
        "response_format",
        "not",
    ),
    "two": ({"response_format": SCHEMA, "grammar": "x"}, "grammar", "response_format and grammar both"),
    "a regular expression": ({"structured_outputs": {"regex": "("}}, "structured_outputs", "structured_outputs: "),
    "nothing": ({"structured_outputs": {}}, "structured_outputs", "give exactly one"),
    "GBNF": ({"grammar": "root ::= ("}, "grammar", "grammar: "),
    "not an object": ({"json_schema": "x"}, "json_schema", "json_schema is"),
}


@pytest.mark.parametrize("path", ["chat", "text"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(client: Client, case: str, path: str) -> None:
    fields, param, words = REFUSED[case]
    reply = client.say("text", **fields) if path == "chat" else client.ask(TEXT, prompt="a", **fields)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert words in reply.error
    assert "\n" not in reply.error


def test_text_is_no_structure(client: Client) -> None:
    for fields in ({"response_format": {"type": "text"}}, {"grammar": ""}):
        assert message(client.say("text", **fields))["content"] == TEXTS["text"]


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "{" start | value_0\nvalue_0: /"city": "[A-Z]/ /[a-z]+/ "\\"}"',
        '?start: k_text\nk_text: k_calls\nk_calls: "{" /[^{}]+/ "}"',
        '  start: %json {"type": "object", "additionalProperties": {"type": "string"}} // start',
        'root ::= "{" root | [^{}I]+ "}"',
    ],
)
def test_a_grammar_of_any_names_can_be_given_beside_tools(client: Client, grammar: str) -> None:
    assert message(client.say("json", grammar=grammar, tools=[WEATHER]))["content"] == OSLO
    (call,) = message(client.say("call", grammar=grammar, tools=[WEATHER]))["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert message(client.say("text", grammar=grammar, tools=[WEATHER], max_tokens=4))["content"][0] in '{"'


@pytest.mark.parametrize("word", ["nullable", "uniqueItems"])
@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"response_format": SCHEMA}])
def test_the_tool_whose_schema_is_refused_is_named(client: Client, word: str, fields: dict) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "array", word: True}}}
    tools = [WEATHER, {"type": "function", "function": {"name": "broken", "parameters": bad}}]
    refused = client.say("call", tools=tools, **fields)
    assert refused.status == 400
    assert f'the tool broken: the schema has "{word}", which cannot be enforced' in refused.error


def test_a_tool_that_is_not_enforced_is_not_blamed(client: Client) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    first, second = ({"name": name, "parameters": bad, "strict": name == "second"} for name in ("first", "second"))
    tools = [{"type": "function", "function": function} for function in (first, second)]
    assert "the tool second: " in client.say("call", tools=tools).error


# -- structures that take long ---------------------------------------------------------------------------------------


def test_structures_that_take_long_delay_no_chat_without_a_new_structure(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"response_format": SCHEMA}
    assert message(client.say("json", **known))["content"] == OSLO
    compiler, gate, n_begun = client.llm.runner.compiler, threading.Event(), 0
    compiled = compiler.compile

    def slow(structure: Structure) -> Compiled:
        nonlocal n_begun
        n_begun += 1
        assert gate.wait(60)
        return compiled(structure)

    monkeypatch.setattr(compiler, "compile", slow)

    async def talk() -> tuple[list[Reply], list[Reply]]:
        def ask(name: str, fields: dict) -> Coroutine[None, None, Reply]:
            body = {"messages": [{"role": "user", "content": f"play {name}"}], "temperature": 0} | fields
            return client._ask("/v1/chat/completions", json.dumps(body).encode(), None)

        new = [{"structured_outputs": {"choice": [OSLO, str(i)]}} for i in range(MOST)]
        waiting = [asyncio.ensure_future(ask("json", fields)) for fields in new]
        while n_begun < MOST:
            await asyncio.sleep(0.001)
        free = [await ask("text", {}), await ask("json", known), await ask("json", {"grammar": 'root ::= "x"'})]
        gate.set()
        return free, list(await asyncio.gather(*waiting))

    (text, again, refused), others = client._loop.run_until_complete(talk())
    assert message(text)["content"] == TEXTS["text"]
    assert message(again)["content"] == OSLO
    assert (refused.status, refused.headers["retry-after"]) == (503, "10")
    assert refused.error == "too many structures are being compiled: try again later"
    assert {message(each)["content"] for each in others} == {OSLO}
    monkeypatch.undo()
    assert client.say("json", grammar='root ::= "x"').status == 200
