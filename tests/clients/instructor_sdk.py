"""instructor: structured answers, by prompt, by tools and by JSON mode."""

import contextlib
from typing import Literal

import instructor
import openai
from instructor.core import InstructorRetryException
from pydantic import BaseModel
from rows import ASKED, MODEL, run, works


class City(BaseModel):
    name: Literal["Oslo", "Rome"]


def extract(address: str, mode: instructor.Mode) -> None:
    raw = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(raw, mode=mode)
    fields = {"model": MODEL, "messages": ASKED, "max_tokens": 60, "temperature": 0, "max_retries": 0}
    assert client.chat.completions.create(response_model=City, **fields).name in ("Oslo", "Rome")


def accepted(address: str, mode: instructor.Mode) -> None:
    """Whether a model of 135M parameters finds the right keys is not the question here."""
    with contextlib.suppress(InstructorRetryException, instructor.core.IncompleteOutputException):
        extract(address, mode)


ROWS = [
    works("TOOLS", lambda a: extract(a, instructor.Mode.TOOLS)),
    works("JSON_SCHEMA", lambda a: extract(a, instructor.Mode.JSON_SCHEMA)),
    works("JSON: the request is accepted", lambda a: accepted(a, instructor.Mode.JSON)),
    works("MD_JSON: the request is accepted", lambda a: accepted(a, instructor.Mode.MD_JSON)),
]

if __name__ == "__main__":
    run(("instructor",), ROWS)
