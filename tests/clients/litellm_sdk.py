"""litellm: the providers that speak to servers like this one."""

import json

import litellm
from rows import ASKED, FOX, MODEL, answer, continued, run, works

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY, "strict": True}}


def ask(address: str, provider: str, **fields: object) -> litellm.ModelResponse:
    given = {"messages": ASKED, "max_tokens": 20, "temperature": 0} | fields
    return litellm.completion(f"{provider}/{MODEL}", api_base=f"{address}/v1", api_key="none", num_retries=0, **given)


def chat(address: str, provider: str) -> None:
    assert ask(address, provider).choices[0].message.content == answer(address)


def stream(address: str) -> None:
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(address, "openai", stream=True)]
    assert "".join(pieces) == answer(address)


def completion(address: str) -> None:
    given = {"prompt": FOX, "max_tokens": 5, "temperature": 0, "api_base": f"{address}/v1", "api_key": "none"}
    found = litellm.text_completion(model=f"text-completion-openai/{MODEL}", **given)
    assert found.choices[0].text == continued(address)


def tools(address: str) -> None:
    fields = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 100}
    (call, *_) = ask(address, "openai", **fields).choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    chunks = list(ask(address, "openai", stream=True, **fields))
    joined = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert joined[0].function.arguments == call.function.arguments


def structured(address: str) -> None:
    found = ask(address, "hosted_vllm", response_format=SCHEMA, max_tokens=100).choices[0].message.content
    assert json.loads(found)["city"] in ("Oslo", "Rome")


ROWS = [
    works("openai/", lambda a: chat(a, "openai")),
    works("hosted_vllm/", lambda a: chat(a, "hosted_vllm")),
    works("text-completion-openai/", completion),
    works("stream", stream),
    works("tools, whole and streamed", tools),
    works("response_format json_schema", structured),
]

if __name__ == "__main__":
    run(("litellm",), ROWS)
