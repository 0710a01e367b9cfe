"""pydantic-ai: agents with and without a type for the answer."""

import asyncio
import contextlib
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from rows import MODEL, QUESTION, answer, run, works


class City(BaseModel):
    name: Literal["Oslo", "Rome"]


def agent(address: str, **fields: object) -> Agent:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{address}/v1", api_key="none"))
    return Agent(model, model_settings={"temperature": 0, "max_tokens": 100}, retries=0, **fields)


def text(address: str) -> None:
    assert agent(address).run_sync(QUESTION).output == answer(address, 100)


def stream(address: str) -> None:
    async def play() -> str:
        async with agent(address).run_stream(QUESTION) as found:
            return await found.get_output()

    assert asyncio.run(play()) == answer(address, 100)


def city(address: str, output_type: object) -> None:
    """With tools (its default), with response_format, and with JSON mode and instructions."""
    found = agent(address, output_type=output_type).run_sync("Name a city.").output
    assert found.name in ("Oslo", "Rome")


def prompted(address: str) -> None:
    """JSON mode: whether a model of 135M parameters finds the right keys is not the question here."""
    with contextlib.suppress(UnexpectedModelBehavior):
        city(address, PromptedOutput(City))


def native_stream(address: str) -> None:
    async def play() -> City:
        async with agent(address, output_type=NativeOutput(City)).run_stream("Name a city.") as found:
            return await found.get_output()

    assert asyncio.run(play()).name in ("Oslo", "Rome")


ROWS = [
    works("text", text),
    works("stream", stream),
    works("instructions", lambda a: agent(a, instructions="Be brief.").run_sync(QUESTION)),
    works("output_type (tools)", lambda a: city(a, City)),
    works("NativeOutput (response_format)", lambda a: city(a, NativeOutput(City))),
    works("NativeOutput, streamed", native_stream),
    works("PromptedOutput: the request is accepted", prompted),
]

if __name__ == "__main__":
    run(("pydantic-ai-slim",), ROWS)
