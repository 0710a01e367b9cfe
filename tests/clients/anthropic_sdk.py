"""The `anthropic` package: /v1/messages."""

import anthropic
from rows import ASKED, MODEL, refused, run


def messages(address: str) -> None:
    client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
    client.messages.create(model=MODEL, max_tokens=8, messages=ASKED)


if __name__ == "__main__":
    run(("anthropic",), [refused("messages", messages)])
