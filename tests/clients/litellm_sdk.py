"""litellm: the providers that speak to servers like this one."""

import litellm
from rows import ASKED, FOX, MODEL, answer, continued, refused, run, works

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


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


ROWS = [
    works("openai/", lambda a: chat(a, "openai")),
    works("hosted_vllm/", lambda a: chat(a, "hosted_vllm")),
    works("text-completion-openai/", completion),
    works("stream", stream),
    refused("tools", lambda a: ask(a, "openai", tools=[TOOL])),
    refused("response_format", lambda a: ask(a, "openai", response_format={"type": "json_object"})),
]

if __name__ == "__main__":
    run(("litellm",), ROWS)
