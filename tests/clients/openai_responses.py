"""The `openai` package: the Responses API."""

import asyncio
from typing import Literal

import openai
from openai.types.responses import Response, ResponseCompletedEvent
from pydantic import BaseModel
from rows import MODEL, QUESTION, SHORT, answer, refused, run, works

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "weather", "description": "The weather.", "parameters": CITY, "strict": True}
FOLLOWING = "And of Italy?"


class City(BaseModel):
    city: Literal["Oslo", "Rome"]


def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)


def ask(address: str, **fields: object) -> Response:
    return client(address).responses.create(**given(**fields))


def given(**fields: object) -> dict:
    return {"model": MODEL, "input": QUESTION, "max_output_tokens": 20, "temperature": 0} | fields


def text(address: str) -> None:
    found = ask(address)
    assert found.output_text == answer(address)
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    messages = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    assert ask(address, input=messages).output_text == answer(address)
    assert ask(address, max_output_tokens=2).incomplete_details.reason == "max_output_tokens"


def stream(address: str) -> None:
    events = list(client(address).responses.create(**given(), stream=True))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == answer(address)
    assert len(pieces) > 5
    assert [event.sequence_number for event in events] == list(range(len(events)))


def joined(address: str) -> None:
    """`responses.stream` puts the response together from its events."""
    with client(address).responses.stream(**given(input=SHORT)) as events:
        last = [event for event in events if isinstance(event, ResponseCompletedEvent)]
        final = events.get_final_response()
    assert final.output_text == answer(address, question=SHORT)
    assert last


def asynchronous(address: str) -> None:
    async def play() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            asks = [client.responses.create(**given()) for _ in range(4)]
            return [found.output_text for found in await asyncio.gather(*asks)]

    assert asyncio.run(play()) == [answer(address)] * 4


def tools(address: str) -> None:
    """A call, its result, and an answer that continues the tokens."""
    first = ask(address, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_output_tokens=100)
    call = first.output[-1]
    assert (call.type, call.name) == ("function_call", "weather")
    assert City.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = ask(address, input=[result], previous_response_id=first.id, tools=[WEATHER], tool_choice="none")
    assert second.output_text
    continues(first, second)
    items = [{"role": "user", "content": QUESTION}, *(each.model_dump() for each in first.output), result]
    assert ask(address, input=items, tools=[WEATHER], store=False).output


def continues(first: Response, second: Response) -> None:
    """All tokens of the first response are reused, but the last one, which was not computed."""
    assert second.model_extra["kvarn"]["continued"]["tokens"] >= first.usage.total_tokens - 1
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1


def streamed_tools(address: str) -> None:
    fields = given(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_output_tokens=100)
    events = list(client(address).responses.create(**fields, stream=True))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = (event for event in events if event.type == "response.function_call_arguments.done")
    assert "".join(pieces) == done.arguments
    assert City.model_validate_json(done.arguments)


def previous(address: str) -> None:
    first = ask(address, max_output_tokens=100)
    second = ask(address, input=FOLLOWING, previous_response_id=first.id)
    continues(first, second)
    third = list(client(address).responses.create(**given(input="Why?", previous_response_id=second.id), stream=True))
    continues(second, third[-1].response)
    whole = [{"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": FOLLOWING}]
    assert ask(address, input=[each if isinstance(each, dict) else each.model_dump() for each in whole]).output_text


def stored(address: str) -> None:
    api, made = client(address).responses, ask(address, metadata={"a": "b"})
    assert api.retrieve(made.id).output_text == made.output_text
    (item,) = api.input_items.list(made.id)
    assert item.content[0].text == QUESTION
    api.delete(made.id)
    for id in (made.id, ask(address, store=False).id):
        try:
            api.retrieve(id)
        except openai.NotFoundError:
            continue
        raise AssertionError("it is still there")


def parse(address: str) -> None:
    found = client(address).responses.parse(**given(max_output_tokens=100), text_format=City)
    assert found.output_parsed.city in ("Oslo", "Rome")
    called = client(address).responses.parse(
        **given(max_output_tokens=100, tool_choice="required"), tools=[openai.pydantic_function_tool(City)]
    )
    assert called.output[0].parsed_arguments.city in ("Oslo", "Rome")


def tokens(address: str) -> None:
    counted = client(address).responses.input_tokens.count(model=MODEL, input=QUESTION)
    assert counted.input_tokens == ask(address).usage.input_tokens


def logprobs(address: str) -> None:
    found = ask(address, top_logprobs=2, include=["message.output_text.logprobs"])
    entries = found.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries).startswith(answer(address)[:20])
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def reported(address: str) -> None:
    found = ask(
        address,
        tools=[{"type": "web_search"}, {"type": "image_generation"}, {"type": "local_shell"}],
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        service_tier="flex",
        truncation="auto",
    )
    told = found.model_extra["kvarn"]["ignored"]
    assert told[-4:-1] == ["tools[0] (web_search)", "tools[1] (image_generation)", "tools[2] (local_shell)"]


ROWS = [
    works("responses: a text, items, max_output_tokens", text),
    works("streams, also put together by the package", stream),
    works("responses.stream", joined),
    works("AsyncOpenAI, 4 at a time", asynchronous),
    works("tools: a call and its result", tools),
    works("streamed calls", streamed_tools),
    works("previous_response_id: all tokens of the earlier turns are reused", previous),
    works("retrieve, delete, input_items, store: false", stored),
    works("responses.parse: text_format and tools of pydantic", parse),
    works("input_tokens.count", tokens),
    works("top_logprobs", logprobs),
    works("tools and fields that are accepted and reported", reported),
    refused("background", lambda a: ask(a, background=True)),
    refused("conversation", lambda a: ask(a, conversation="conv_1")),
    refused("item_reference", lambda a: ask(a, input=[{"type": "item_reference", "id": "msg_1"}])),
    refused(
        "vision",
        lambda a: ask(
            a, input=[{"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "auto"}]}]
        ),
    ),
    refused("another key's or no response", lambda a: ask(a, previous_response_id="resp_none")),
]

if __name__ == "__main__":
    run(("openai",), ROWS)
