"""outlines with from_openai: text, and a schema."""

import openai
import outlines
from pydantic import BaseModel
from rows import MODEL, QUESTION, answer, refused, run, works


class City(BaseModel):
    name: str


def model(address: str) -> outlines.models.OpenAI:
    return outlines.from_openai(openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0), MODEL)


def text(address: str) -> None:
    assert model(address)(QUESTION, max_tokens=20, temperature=0) == answer(address)


ROWS = [
    works("text", text),
    refused("schema", lambda a: model(a)("Name a city.", City, max_tokens=20)),
]

if __name__ == "__main__":
    run(("outlines",), ROWS)
