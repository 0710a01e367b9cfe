"""The `openai` package: what a chat or a completion can ask for, and the rest of its API."""

import asyncio
import json
from typing import Literal

import openai
from pydantic import BaseModel
from rows import ASKED, FOX, MODEL, answer, continued, refused, run, works

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY, "strict": True}}


def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)


def chat(address: str, **fields: object) -> openai.types.chat.ChatCompletion:
    given = {"model": MODEL, "messages": ASKED, "max_tokens": 8, "temperature": 0} | fields
    return client(address).chat.completions.create(**given)


def text(address: str, **fields: object) -> openai.types.Completion:
    given = {"model": MODEL, "prompt": FOX, "max_tokens": 8, "temperature": 0} | fields
    return client(address).completions.create(**given)


def models(address: str) -> None:
    (found,) = client(address).models.list()
    assert (found.id, client(address).models.retrieve(MODEL).id) == (MODEL, MODEL)
    assert found.created > 1_600_000_000


def whole(address: str) -> None:
    found = chat(address, max_tokens=20)
    assert found.choices[0].message.content == answer(address)
    assert found._request_id
    assert found.system_fingerprint.startswith("bits-kvarn-")
    again = [*ASKED, found.choices[0].message.model_dump(), ASKED[0]]  # the message as it came
    assert chat(address, messages=again).usage.prompt_tokens_details.cached_tokens > 20


def completion(address: str) -> None:
    assert text(address).choices[0].text == continued(address, 8)


def stream(address: str) -> None:
    pieces = [chunk.choices[0].delta.content or "" for chunk in chat(address, stream=True, max_tokens=20)]
    assert "".join(pieces) == answer(address)
    assert len(pieces) > 5
    assert "".join(chunk.choices[0].text for chunk in text(address, stream=True)) == continued(address, 8)


def usage_in_stream(address: str) -> None:
    chunks = list(chat(address, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 8
    each = list(text(address, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    assert [chunk.usage.completion_tokens for chunk in each][-2:] == [8, 8]


def echo(address: str) -> None:
    whole = FOX + continued(address, 8)
    found = text(address, echo=True)
    assert (found.choices[0].text, found.choices[0].logprobs) == (whole, None)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (4, 8)
    assert "".join(chunk.choices[0].text for chunk in text(address, echo=True, stream=True)) == whole
    assert text(address, prompt=[504, 2365], echo=True).choices[0].text.startswith("The quick")
    two = text(address, prompt=[FOX, "The sea"], echo=True, n=2, max_tokens=1).choices
    assert [each.text.startswith(FOX) for each in two] == [True, True, False, False]
    assert [each.text.startswith("The sea") for each in two] == [False, False, True, True]


def echo_logprobs(address: str) -> None:
    """A token has the same log-probability in a prompt and in an answer."""
    found = text(address, echo=True, logprobs=2, max_tokens=5)
    whole, given = found.choices[0].text, found.choices[0].logprobs
    assert "".join(given.tokens) == whole == FOX + continued(address, 5)
    assert given.text_offset == [len("".join(given.tokens[:at])) for at in range(4 + 5)]
    assert (given.token_logprobs[0], given.top_logprobs[0]) == (None, None)
    for logprob, top in zip(given.token_logprobs[1:], given.top_logprobs[1:], strict=True):
        assert logprob <= max(top.values()) <= 0
    assert given.token_logprobs[4:] == [max(top.values()) for top in given.top_logprobs[4:]], "at temperature 0"
    alone = text(address, logprobs=2, max_tokens=5).choices[0].logprobs
    again = text(address, prompt=whole, echo=True, logprobs=2, max_tokens=1).choices[0].logprobs
    assert (given.tokens[4:], given.tokens) == (alone.tokens, again.tokens[:-1])
    for one, other in zip(given.token_logprobs[4:], alone.token_logprobs, strict=True):
        assert abs(one - other) < 1e-6
    for one, other in zip(given.token_logprobs[1:], again.token_logprobs[1:-1], strict=True):
        assert abs(one - other) < 1e-6


def asynchronous(address: str) -> None:
    async def play() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            asks = [client.completions.create(model=MODEL, prompt=FOX, max_tokens=4, temperature=0) for _ in range(4)]
            return [answer.choices[0].text for answer in await asyncio.gather(*asks)]

    assert asyncio.run(play()) == [continued(address, 4)] * 4


def choices(address: str) -> None:
    found = chat(address, n=3, seed=1, temperature=1.0, logprobs=True, top_logprobs=2, logit_bias={"7": -100})
    assert len(found.choices) == 3
    assert len(found.choices[0].logprobs.content[0].top_logprobs) == 2
    assert chat(address, seed=5, temperature=1).choices == chat(address, seed=5, temperature=1).choices
    assert chat(address, stop=[answer(address)[5:9]], max_tokens=20).choices[0].finish_reason == "stop"


def defaults(address: str) -> None:
    """Answers are drawn with the model's own settings. smollm2's file has none: these are kvarn's for any model."""
    for ask in (chat, text):
        found = [ask(address, temperature=openai.omit, seed=seed).choices for seed in range(4)]
        assert found == [ask(address, temperature=0.7, top_p=0.95, seed=seed).choices for seed in range(4)]
        assert len({str(each) for each in found}) > 1


def forms(address: str) -> None:
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    assert chat(address, messages=parts, max_completion_tokens=4, max_tokens=None).usage.completion_tokens == 4
    assert len(text(address, prompt=[FOX, "The sea"]).choices) == 2
    assert text(address, prompt=[504, 2365]).usage.prompt_tokens == 2
    assert continued(address).startswith(text(address, logprobs=2).choices[0].logprobs.tokens[0])


def harmless(address: str) -> None:
    chat(address, service_tier="auto", prompt_cache_key="a", safety_identifier="b", parallel_tool_calls=True, user="c")
    chat(address, model="gpt-4o", stop="", extra_body={"top_k": -1, "min_tokens": 0, "cache_prompt": True})
    assert chat(address, max_tokens=-1, stop=[answer(address)[-3:]]).choices[0].finish_reason == "stop"


def cancel(address: str) -> None:
    with text(address, stream=True, max_tokens=500, extra_body={"ignore_eos": True}) as events:
        next(iter(events))


def tools(address: str) -> None:
    """A required call, its result, and an answer."""
    message = (
        chat(address, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=100)
        .choices[0]
        .message
    )
    (call, *_) = message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."}
    answered = chat(address, messages=[*ASKED, message.model_dump(exclude_none=True), result], tools=[TOOL])
    assert answered.usage.prompt_tokens_details.cached_tokens > 20
    assert chat(address, tools=[TOOL], tool_choice="none").choices[0].message.content
    named = {"type": "function", "function": {"name": "weather"}}
    assert chat(address, tools=[TOOL], tool_choice=named, max_tokens=100).choices[0].finish_reason == "tool_calls"


def streamed_tools(address: str) -> None:
    """As the package joins the deltas."""
    fields = {"model": MODEL, "messages": ASKED, "temperature": 0, "max_tokens": 100, "parallel_tool_calls": False}
    with client(address).chat.completions.stream(**fields, tools=[TOOL], tool_choice="required") as events:
        kinds = [event.type for event in events]
        final = events.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    assert final.finish_reason == "tool_calls"
    assert json.loads(final.message.tool_calls[0].function.arguments)["city"] in ("Oslo", "Rome")


NAMED = {"type": "function", "function": {"name": "Weather"}}


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Rome"]


def parse(address: str) -> None:
    fields = {"model": MODEL, "messages": ASKED, "max_tokens": 100, "temperature": 0}
    found = client(address).chat.completions.parse(**fields, response_format=Weather)
    assert found.choices[0].message.parsed.city in ("Oslo", "Rome")
    tool = openai.pydantic_function_tool(Weather)
    found = client(address).chat.completions.parse(**fields, tools=[tool], tool_choice=NAMED)
    assert found.choices[0].message.tool_calls[0].function.parsed_arguments.city in ("Oslo", "Rome")


def structures(address: str) -> None:
    found = chat(address, response_format=SCHEMA, max_tokens=100).choices[0].message.content
    assert json.loads(found)["city"] in ("Oslo", "Rome")
    whole = chat(address, response_format={"type": "json_object"}, max_tokens=200).choices[0]
    assert whole.finish_reason == "length" or isinstance(json.loads(whole.message.content), dict)
    for fields in ({"structured_outputs": {"choice": ["yes", "no"]}}, {"grammar": 'root ::= "yes" | "no"'}):
        assert chat(address, extra_body=fields).choices[0].message.content in ("yes", "no")
        assert text(address, extra_body=fields).choices[0].text in ("yes", "no")


def reported(address: str) -> None:
    part = {"type": "text", "text": "Hi", "citations": [1]}
    found = chat(
        address,
        messages=[{"role": "user", "content": [part]}],
        tools=[{"type": "web_search"}],
        verbosity="high",
        reasoning_effort="high",
        prediction={"type": "content", "content": "x"},
    )
    where = ["prediction", "verbosity", "messages[0].content[0].citations", "tools[0] (web_search)"]
    assert sorted(found.kvarn["ignored"]) == sorted([*where, "reasoning_effort"])


def embeddings(address: str) -> None:
    create = client(address).embeddings.create
    coded = create(model=MODEL, input=["The sea", "The sky"])  # the package asks for base64
    plain = create(model=MODEL, input="The sea", encoding_format="float")
    assert plain.data[0].embedding == coded.data[0].embedding
    assert coded.usage.prompt_tokens == coded.usage.total_tokens > 3


ROWS = [
    works("models", models),
    works("chat, its message sent back, cached tokens, request id", whole),
    works("completion", completion),
    works("stream of chats and completions", stream),
    works("usage in streams, continuous_usage_stats", usage_in_stream),
    works("echo, also of streams, token ids and several prompts", echo),
    works("echo with logprobs: those of the prompt, too", echo_logprobs),
    works("AsyncOpenAI, 4 at a time", asynchronous),
    works("n, seed, stop, logprobs, top_logprobs, logit_bias", choices),
    works("temperature and top_p left out: the model's own", defaults),
    works("developer role, text parts, several prompts, token ids, max_completion_tokens", forms),
    works("fields that change nothing, any model name, max_tokens -1", harmless),
    works("a stream closed early", cancel),
    works("tools, tool_choice, role tool", tools),
    works("streamed tool calls, joined by the package", streamed_tools),
    works("chat.completions.parse: response_format and tools of pydantic", parse),
    works("response_format json_schema and json_object, structured_outputs, grammar", structures),
    works("fields, tools and keys that are accepted and reported", reported),
    refused("functions (legacy)", lambda a: chat(a, functions=[TOOL["function"]])),
    refused("vision", lambda a: chat(a, messages=[{"role": "user", "content": [IMAGE]}])),
    refused("audio", lambda a: chat(a, modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"})),
    refused("suffix", lambda a: text(a, suffix="end")),
    refused("best_of", lambda a: text(a, best_of=2)),
    works("embeddings, as numbers and as base64", embeddings),
    refused("embeddings, shortened", lambda a: client(a).embeddings.create(model=MODEL, input="Hi", dimensions=8)),
    refused("moderations", lambda a: client(a).moderations.create(input="Hi")),
    refused("files", lambda a: client(a).files.list()),
]

if __name__ == "__main__":
    run(("openai",), ROWS)
