"""instructor: structured answers, by prompt, by tools and by JSON mode."""

import contextlib

import instructor
import openai
from instructor.core import InstructorRetryException
from pydantic import BaseModel
from rows import ASKED, MODEL, refused, run, works


class City(BaseModel):
    name: str


def extract(address: str, mode: instructor.Mode) -> None:
    raw = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(raw, mode=mode)
    fields = {"model": MODEL, "messages": ASKED, "max_tokens": 60, "temperature": 0, "max_retries": 0}
    client.chat.completions.create(response_model=City, **fields)


def by_prompt(address: str) -> None:
    """Whether a model of 135M parameters writes valid JSON is not the question here."""
    with contextlib.suppress(InstructorRetryException, instructor.core.IncompleteOutputException):
        extract(address, instructor.Mode.MD_JSON)


ROWS = [
    works("MD_JSON: the request is accepted", by_prompt),
    refused("TOOLS", lambda a: extract(a, instructor.Mode.TOOLS)),
    refused("JSON", lambda a: extract(a, instructor.Mode.JSON)),
    refused("JSON_SCHEMA", lambda a: extract(a, instructor.Mode.JSON_SCHEMA)),
]

if __name__ == "__main__":
    run(("instructor",), ROWS)
