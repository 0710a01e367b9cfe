"""outlines with from_openai: text, and a schema."""

from typing import Literal

import openai
import outlines
from pydantic import BaseModel
from rows import MODEL, QUESTION, answer, run, works


class City(BaseModel):
    name: Literal["Oslo", "Rome"]


def model(address: str) -> outlines.models.OpenAI:
    return outlines.from_openai(openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0), MODEL)


def text(address: str) -> None:
    assert model(address)(QUESTION, max_tokens=20, temperature=0) == answer(address)


def schema(address: str) -> None:
    found = model(address)("Name a city.", City, max_tokens=100, temperature=0)
    assert City.model_validate_json(found).name in ("Oslo", "Rome")


ROWS = [
    works("text", text),
    works("schema", schema),
]

if __name__ == "__main__":
    run(("outlines",), ROWS)
