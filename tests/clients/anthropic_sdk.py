"""The `anthropic` package: /v1/messages and its token count."""

import asyncio
from typing import Any

import anthropic
from rows import ASKED, MODEL, QUESTION, answer, refused, run, works

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather in a city", "input_schema": CITY}
GREEDY = {"temperature": 0}  # no longer a parameter of the package
COMMON: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "messages": ASKED, "extra_body": GREEDY}


def client(address: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)


def create(address: str, **fields: Any) -> anthropic.types.Message:
    return client(address).messages.create(**COMMON | fields)


def message(address: str) -> None:
    found = create(address)
    (block,) = found.content
    assert (found.role, found.stop_reason, block.type) == ("assistant", "max_tokens", "text")
    assert block.text == answer(address)
    assert found._request_id


def streamed(address: str) -> None:
    with client(address).messages.stream(**COMMON) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == answer(address)
    assert final.usage.output_tokens == 20
    kinds = [event.type for event in create(address, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]


def asynchronous(address: str) -> None:
    async def asked() -> str:
        found = anthropic.AsyncAnthropic(base_url=address, api_key="none", max_retries=0)
        async with found, found.messages.stream(**COMMON) as stream:
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(asked()) == answer(address)


def usage(address: str) -> None:
    system = [{"type": "text", "text": "You know the capitals. " * 20, "cache_control": {"type": "ephemeral"}}]
    counted = client(address).messages.count_tokens(model=MODEL, messages=ASKED, system=system).input_tokens
    for expected in (False, True):
        used = create(address, system=system).usage
        assert used.input_tokens + used.cache_creation_input_tokens + used.cache_read_input_tokens == counted
        assert not expected or used.cache_read_input_tokens == counted - 1


def tools(address: str) -> None:
    """A call, its result, and the answer after it."""
    fields = {"tools": [WEATHER], "max_tokens": 60}
    asked = create(address, tool_choice={"type": "tool", "name": "get_weather"}, **fields)
    assert asked.stop_reason == "tool_use"
    (call,) = (block for block in asked.content if block.type == "tool_use")
    assert (call.name, set(call.input)) == ("get_weather", {"city"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    talk = [*ASKED, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    assert create(address, messages=talk, **fields).content
    with client(address).messages.stream(
        **COMMON | fields | {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    ) as stream:
        final = stream.get_final_message()
    assert [block.name for block in final.content if block.type == "tool_use"] == ["get_weather"]


def thinking(address: str) -> None:
    """Accepted and reported: the model does not reason. Its blocks come back as they were."""
    thought = {"type": "thinking", "thinking": "A greeting.", "signature": "abc"}
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "Hello."}]}
    talk = [{"role": "user", "content": "Hi"}, said, *ASKED]
    found = create(address, messages=talk, thinking={"type": "enabled", "budget_tokens": 1024})
    assert found.content[0].type == "text"
    assert found.kvarn["ignored"] == ["thinking.budget_tokens", "thinking"]


def stops(address: str) -> None:
    word = answer(address).split()[3]
    found = create(address, stop_sequences=[word])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", word)


def structure(address: str) -> None:
    form = {"type": "json_schema", "schema": CITY | {"additionalProperties": False}}
    text = create(address, output_config={"format": form}, max_tokens=60).content[0].text
    assert text.startswith("{")


def agents(address: str) -> None:
    """What Claude Code sends besides."""
    found = create(
        address,
        tools=[WEATHER, {"type": "web_search_20250305", "name": "web_search"}],
        metadata={"user_id": "u"},
        extra_headers={"anthropic-beta": "interleaved-thinking-2025-05-14"},
        extra_body=GREEDY | {"context_management": {"edits": []}},
    )
    assert found.kvarn["ignored"] == ["context_management", "tools[1] (web_search_20250305)"]


def diagnosed(address: str) -> None:
    first = create(address, system="You are brief.")
    found = create(address, system="You are kind.", diagnostics={"previous_message_id": first.id}).diagnostics
    assert found.cache_miss_reason.type == "system_changed"
    assert found.cache_miss_reason.cache_missed_input_tokens > 0


def models(address: str) -> None:
    (model,) = client(address).models.list()
    assert (model.id, model.type, model.lifecycle) == (MODEL, "model", "active")
    assert client(address).models.retrieve(MODEL) == model


def errors(address: str) -> None:
    error = None
    try:
        create(address, max_tokens=-1)
    except anthropic.BadRequestError as raised:
        error = raised
    assert error is not None
    assert error.body["error"]["type"] == "invalid_request_error"
    assert "max_tokens is -1" in str(error)


def image(address: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aaaa"}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    create(address, messages=[{"role": "user", "content": parts}])


def prefill(address: str) -> None:
    turns = [*ASKED, {"role": "assistant", "content": "The capital"}]
    count = client(address).messages.count_tokens
    asked, more = (count(model=MODEL, messages=each).input_tokens for each in (ASKED, turns))
    assert 0 < more - asked < 4, "only the text is added: nothing closes the turn"
    (block,) = create(address, messages=turns).content
    with client(address).messages.stream(**COMMON | {"messages": turns}) as stream:
        assert stream.get_final_text() == block.text


if __name__ == "__main__":
    run(
        ("anthropic",),
        [
            works("messages", message),
            works("messages, streamed", streamed),
            works("messages, asynchronous", asynchronous),
            works("usage of the cache, `count_tokens`", usage),
            works("tools: a call and its result, whole and streamed", tools),
            works("`thinking`, and thinking blocks in the history", thinking),
            works("`stop_sequences`", stops),
            works("`output_config` with a JSON schema", structure),
            works("what Claude Code sends besides: server tools, betas, `context_management`", agents),
            works("`diagnostics`", diagnosed),
            works("models", models),
            works("a turn of the assistant at the end is continued", prefill),
            works("errors are those of the client", errors),
            refused("images", image),
        ],
    )
