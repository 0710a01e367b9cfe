"""openai-agents: with chat completions, and with its default, the Responses API."""

from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from rows import MODEL, QUESTION, answer, refused, run, works

set_tracing_disabled(True)


@function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


class City(BaseModel):
    name: Literal["Oslo", "Rome"]


def ask(address: str, kind: type = OpenAIChatCompletionsModel, **fields: object) -> str:
    client = AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    fields = {"model_settings": ModelSettings(temperature=0, max_tokens=20)} | fields
    agent = Agent("a", model=kind(MODEL, client), **fields)
    return Runner.run_sync(agent, QUESTION, max_turns=1).final_output


def text(address: str) -> None:
    assert ask(address) == answer(address)


def tools(address: str) -> None:
    """The call is required and its result is the answer."""
    settings = ModelSettings(temperature=0, max_tokens=100, tool_choice="required")
    found = ask(address, tools=[weather], tool_use_behavior="stop_on_first_tool", model_settings=settings)
    assert found in ("sunny in Oslo", "sunny in Rome")


def structured(address: str) -> None:
    settings = ModelSettings(temperature=0, max_tokens=100)
    assert ask(address, output_type=City, model_settings=settings).name in ("Oslo", "Rome")
    fields = {"tools": [weather], "tool_use_behavior": "stop_on_first_tool", "model_settings": settings}
    beside = ask(address, output_type=City, **fields)
    assert beside in ("sunny in Oslo", "sunny in Rome", City(name="Oslo"), City(name="Rome"))


ROWS = [
    works("OpenAIChatCompletionsModel, without tools", text),
    works("tools: a call, run by the agent", tools),
    works("output_type, also beside tools", structured),
    refused("Responses API (its default)", lambda a: ask(a, OpenAIResponsesModel)),
]

if __name__ == "__main__":
    run(("openai-agents",), ROWS)
