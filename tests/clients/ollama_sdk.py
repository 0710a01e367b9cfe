"""The `ollama` package: chat, generate, embed, and what it asks about models."""

import asyncio
import json

import ollama
from rows import ASKED, MODEL, answer, refused, run, works

SETTINGS = {"temperature": 0, "num_predict": 20}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}


def weather(city: str) -> str:
    """The weather of a city.

    Args:
      city: its name
    """
    return f"It rains in {city}."


def chat(address: str) -> None:
    found = ollama.Client(address).chat(MODEL, ASKED, options=SETTINGS)
    assert found.message.content == answer(address)
    assert found.done_reason in ("stop", "length")
    assert found.prompt_eval_count > 5
    assert found.eval_duration > 0


def chat_stream(address: str) -> None:
    parts = list(ollama.Client(address).chat(MODEL, ASKED, options=SETTINGS, stream=True))
    assert "".join(part.message.content for part in parts) == answer(address)
    assert [part.done for part in parts[-2:]] == [False, True]


def async_stream(address: str) -> None:
    async def play() -> str:
        stream = await ollama.AsyncClient(address).chat(MODEL, ASKED, options=SETTINGS, stream=True)
        return "".join([part.message.content async for part in stream])

    assert asyncio.run(play()) == answer(address)


def tools(address: str) -> None:
    client = ollama.Client(address)
    found = client.chat(MODEL, ASKED, tools=[weather], options=SETTINGS)
    assert found.message.content is not None or found.message.tool_calls
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    turns = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_name": "weather", "content": weather("Oslo")})
    assert client.chat(MODEL, turns, tools=[weather], options=SETTINGS).message.content


def structured(address: str) -> None:
    found = ollama.Client(address).chat(MODEL, ASKED, format=SCHEMA, options={"temperature": 0})
    assert json.loads(found.message.content)["city"] in ("Oslo", "Rome")


def generate(address: str) -> None:
    client = ollama.Client(address)
    whole = client.generate(MODEL, ASKED[0]["content"], options=SETTINGS)
    assert whole.response == answer(address), "the prompt is a user's message"
    parts = client.generate(MODEL, ASKED[0]["content"], options=SETTINGS, stream=True)
    assert "".join(part.response for part in parts) == whole.response


def embed(address: str) -> None:
    client = ollama.Client(address)
    first, second = client.embed(MODEL, ["The sea", "The sky"]).embeddings
    assert len(first) == len(second) > 100
    assert list(client.embed(MODEL, "The sea").embeddings[0]) == list(first), "the same bits alone"


def about(address: str) -> None:
    client = ollama.Client(address)
    assert [model.model for model in client.list().models] == [MODEL]
    assert [model.model for model in client.ps().models] == [MODEL]
    shown = client.show(MODEL)
    assert "completion" in shown.capabilities
    assert any(name.endswith("context_length") for name in shown.modelinfo)


ROWS = [
    works("chat", chat),
    works("chat, streamed", chat_stream),
    works("AsyncClient, streamed", async_stream),
    works("chat with tools, and their results", tools),
    works("chat with a JSON schema as format", structured),
    works("generate, whole and streamed", generate),
    works("embed", embed),
    works("list, ps, show", about),
    refused("images", lambda a: ollama.Client(a).chat(MODEL, [{**ASKED[0], "images": [b"x"]}])),
    refused("pull", lambda a: ollama.Client(a).pull("other")),
]

if __name__ == "__main__":
    run(("ollama",), ROWS)
