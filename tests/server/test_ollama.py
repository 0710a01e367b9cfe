"""Ollama's API."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.scripted import HERMES, HERMES_CONTROL, Client, scripted_llm, scripted_model, serving
from support.serving import Reply

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
CHAT, GENERATE = "/api/chat", "/api/generate"
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
TEXTS = {
    "hello": "Hello there.",
    "thought": "<think>\nHm, so.\n</think>\n\nIt is 4.",
    "call": f"Wait.\n{CALL}",
    "calls": f"{CALL}\n{CALL}",
    "json": '{"a": 1}',
    "broken": "<tool_call>\n{nonsense}\n</tool_call>",
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    path = scripted_model(tmp_path_factory.mktemp("model") / "m.gguf", HERMES, (*HERMES_CONTROL, *FIM))
    with serving(scripted_llm(path, TEXTS, context=512)) as client:
        yield client


def talk(client: Client, name: str, **fields: Any) -> Reply:
    messages = [{"role": "user", "content": f"play {name}"}]
    reply = client.ask(CHAT, **{"model": "m", "messages": messages, "options": {"temperature": 0}} | fields)
    assert reply.status == 200, reply.body
    return reply


def lines(reply: Reply) -> list[dict]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.body.decode().splitlines()]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_streamed_equals_not_streamed(client: Client, name: str, tools: list) -> None:
    whole = talk(client, name, tools=tools, stream=False).json
    *parts, last = lines(talk(client, name, tools=tools))
    assert [part["done"] for part in parts] == [False] * len(parts)
    joined: dict[str, Any] = {"role": "assistant", "content": ""}
    for part in parts:
        for key in ("content", "thinking"):
            if part["message"].get(key):
                joined[key] = joined.get(key, "") + part["message"][key]
        if calls := part["message"].get("tool_calls"):
            joined["tool_calls"] = joined.get("tool_calls", []) + calls
    for message in (joined, whole["message"]):
        for call in message.get("tool_calls", ()):
            assert call.pop("id")
    assert joined == whole["message"]
    assert (last["done"], last["message"]) == (True, {"role": "assistant", "content": ""})
    for key in ("done_reason", "prompt_eval_count", "eval_count", "model"):
        assert last[key] == whole[key]
    assert all(isinstance(each[key], int) for each in (whole, last) for key in DURATIONS)
    assert whole["total_duration"] > whole["eval_duration"] >= 0


def test_parts_of_an_answer(client: Client) -> None:
    body = talk(client, "thought", stream=False).json
    assert (body["message"]["thinking"], body["message"]["content"]) == ("Hm, so.", "It is 4.")
    assert (body["done_reason"], body["model"]) == ("stop", "tiny")
    called = talk(client, "calls", tools=TOOLS, stream=False).json["message"]["tool_calls"]
    assert [call["function"] for call in called] == [{"name": "look", "arguments": {"city": "Oslo", "days": 2}}] * 2
    cut = talk(client, "hello", options={"num_predict": 3, "temperature": 0}, stream=False).json
    assert (cut["done_reason"], cut["eval_count"]) == ("length", 3)


def test_a_conversation_with_tools_goes_on(client: Client) -> None:
    asked = talk(client, "call", tools=TOOLS, stream=False).json["message"]
    messages = [
        {"role": "user", "content": "play call"},
        asked,
        {"role": "tool", "tool_name": "look", "content": "play hello"},
    ]
    assert talk(client, "", messages=messages, tools=TOOLS, stream=False).json["message"]["content"] == "Hello there."
    sent = [{**asked, "tool_calls": [{"function": {"name": "look", "arguments": {"city": "Oslo"}}}]}, *messages[2:]]
    assert talk(client, "", messages=[*messages[:1], *sent], stream=False).json["message"]["content"] == "Hello there."


def test_formats(client: Client) -> None:
    for form in ("json", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}):
        body = talk(client, "json", format=form, stream=False).json
        assert json.loads(body["message"]["content"]) == {"a": 1}
    bad = client.ask(CHAT, model="m", messages=[{"role": "user", "content": "a"}], format={"type": 3})
    assert bad.status == 400
    assert "format" in bad.json["error"]
    assert "json_schema" not in bad.json["error"]


def test_options_have_an_effect(client: Client) -> None:
    stopped = talk(client, "hello", options={"stop": [" there"], "temperature": 0}, stream=False).json
    assert stopped["message"]["content"] == "Hello"
    drawn = {"temperature": 50.0, "seed": 7, "top_k": 5, "top_p": 0.9, "min_p": 0.0, "num_predict": 5}
    bodies = [talk(client, "hello", options=drawn | more, stream=False).json for more in ({}, {}, {"seed": 8})]
    assert bodies[0]["message"] == bodies[1]["message"] != bodies[2]["message"]


def test_what_has_no_effect_is_told(client: Client) -> None:
    options = {"num_ctx": 8192, "num_thread": 4, "temperature": 0, "mirostat": 0, "seed": None}
    body = talk(client, "hello", options=options, keep_alive="5m", stream=False).json
    assert body["kvarn"]["ignored"] == ["keep_alive", "options.num_ctx", "options.num_thread"]
    assert lines(talk(client, "hello", keep_alive=-1))[-1]["kvarn"]["ignored"] == ["keep_alive"]


def test_thinking_can_be_switched_off(client: Client) -> None:
    n = {think: talk(client, "hello", think=think, stream=False).json["prompt_eval_count"] for think in (True, False)}
    assert n[False] > n[True], "this template closes the reasoning before the answer"


def test_generate(client: Client) -> None:
    fields = {"model": "m", "prompt": "play hello", "options": {"temperature": 0}}
    whole = client.ask(GENERATE, **fields, stream=False).json
    assert (whole["response"], whole["done_reason"]) == ("Hello there.", "stop")
    streamed = lines(client.ask(GENERATE, **fields))
    assert "".join(line["response"] for line in streamed) == whole["response"]
    chat = talk(client, "hello", stream=False).json
    assert whole["prompt_eval_count"] == chat["prompt_eval_count"], "the prompt is a user's message"
    system = client.ask(GENERATE, **fields, system="Be brief.", stream=False).json
    assert system["prompt_eval_count"] > whole["prompt_eval_count"]
    raw = client.ask(GENERATE, **fields, raw=True, stream=False).json
    assert raw["prompt_eval_count"] == len(client.llm.tokenizer.encode("play hello"))
    thought = client.ask(GENERATE, **fields | {"prompt": "play thought"}, stream=False).json
    assert (thought["thinking"], thought["response"]) == ("Hm, so.", "It is 4.")
    gap = client.ask(GENERATE, **fields, suffix="end", stream=False).json
    assert gap["prompt_eval_count"] == len(client.llm.tokenizer.encode_gap("play hello", "end") or [])


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_without_a_prompt_nothing_is_computed(client: Client, path: str) -> None:
    before = client.llm.engine.stats.steps
    for fields in ({}, {"messages": []} if path == CHAT else {"prompt": ""}):
        body = client.ask(path, model="m", stream=False, **fields).json
        assert (body["done"], body["done_reason"]) == (True, "load")
        assert [line["done"] for line in lines(client.ask(path, model="m", **fields))] == [True]
    assert client.llm.engine.stats.steps == before


def test_log_probabilities(client: Client) -> None:
    body = talk(client, "hello", logprobs=True, top_logprobs=2, stream=False).json
    assert len(body["logprobs"]) == body["eval_count"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in body["logprobs"])
    streamed = [
        entry
        for line in lines(talk(client, "hello", logprobs=True, top_logprobs=2))
        for entry in line.get("logprobs", ())
    ]
    assert streamed == body["logprobs"]


def test_the_model(client: Client) -> None:
    (tag,) = client.get("/api/tags").json["models"]
    assert (tag["name"], tag["details"]["family"], tag["details"]["format"]) == ("tiny", "llama", "gguf")
    assert tag["size"] > 1000
    assert len(tag["digest"]) == 64
    (loaded,) = client.get("/api/ps").json["models"]
    assert (loaded["context_length"], loaded["digest"]) == (512, tag["digest"])
    for name in ("model", "name"):
        shown = client.ask("/api/show", **{name: "tiny:latest"}).json
        assert shown["model_info"]["llama.context_length"] == 512
        assert shown["capabilities"] == ["completion", "tools", "thinking", "insert", "embedding"]
    assert tuple(map(int, client.get("/api/version").json["version"].split("."))) >= (0, 6, 4)


@pytest.mark.parametrize("name", ["pull", "push", "create", "copy"])
def test_other_models_are_refused_by_name(client: Client, name: str) -> None:
    reply = client.ask(f"/api/{name}", model="other")
    assert (reply.status, f"/api/{name} is not implemented" in reply.json["error"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"messages": []}, "model is missing"),
        (CHAT, {"model": 3}, "model is 3; it must be a string"),
        (
            CHAT,
            {"model": "m", "messages": [{"role": "user", "content": "a", "images": ["x"]}]},
            "messages[0].images is not implemented",
        ),
        (CHAT, {"model": "m", "messages": [{"role": "ghost"}]}, "messages[0].role is"),
        (CHAT, {"model": "m", "messages": [3]}, "messages[0] is 3"),
        (CHAT, {"model": "m", "options": {"frob": 1}}, "options.frob is not implemented"),
        (CHAT, {"model": "m", "options": {"mirostat": 2}}, "options.mirostat is 2"),
        (CHAT, {"model": "m", "options": {"temperature": -1}}, "options.temperature is -1"),
        (CHAT, {"model": "m", "options": 3}, "options is 3"),
        (CHAT, {"model": "m", "think": "much"}, "think is"),
        (CHAT, {"model": "m", "format": "yaml"}, "format is"),
        (CHAT, {"model": "m", "frob": 1}, "frob is not implemented"),
        (GENERATE, {"model": "m", "prompt": "a", "template": "x"}, "template is not implemented"),
        (GENERATE, {"model": "m", "prompt": "a", "images": ["x"]}, "images is not implemented"),
        (GENERATE, {"model": "m", "prompt": "a", "raw": True, "system": "b"}, "system needs the chat template"),
        (GENERATE, {"model": "m", "prompt": "x" * 600, "raw": True}, "this server's context is 512 tokens"),
        ("/api/embed", {"model": "m"}, "input is missing"),
        ("/api/show", {}, "model is missing"),
    ],
)
def test_errors_are_one_line_in_ollamas_form(client: Client, path: str, body: dict, message: str) -> None:
    reply = client.ask(path, **body)
    assert reply.status == 400, reply.body
    assert set(reply.json) == {"error"}
    assert message in reply.json["error"]


def test_an_error_ends_a_stream(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise ArithmeticError("broken")

    monkeypatch.setattr(client.llm.program, "run", fail)
    reply = client.ask(CHAT, model="m", messages=[{"role": "user", "content": "play hello"}])
    assert "ArithmeticError" in lines(reply)[-1]["error"]
