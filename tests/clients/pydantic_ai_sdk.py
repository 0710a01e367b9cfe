"""pydantic-ai: agents with and without a type for the answer."""

import asyncio

from pydantic import BaseModel
from pydantic_ai import Agent, PromptedOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from rows import MODEL, QUESTION, answer, refused, run, works


class City(BaseModel):
    name: str


def agent(address: str, **fields: object) -> Agent:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{address}/v1", api_key="none"))
    return Agent(model, model_settings={"temperature": 0, "max_tokens": 20}, retries=0, **fields)


def text(address: str) -> None:
    assert agent(address).run_sync(QUESTION).output == answer(address)


def stream(address: str) -> None:
    async def play() -> str:
        async with agent(address).run_stream(QUESTION) as found:
            return await found.get_output()

    assert asyncio.run(play()) == answer(address)


ROWS = [
    works("text", text),
    works("stream", stream),
    works("instructions", lambda a: agent(a, instructions="Be brief.").run_sync(QUESTION)),
    refused("output_type", lambda a: agent(a, output_type=City).run_sync(QUESTION)),
    refused("PromptedOutput", lambda a: agent(a, output_type=PromptedOutput(City)).run_sync(QUESTION)),
]

if __name__ == "__main__":
    run(("pydantic-ai-slim",), ROWS)
