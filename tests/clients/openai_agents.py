"""openai-agents: with chat completions, and with its default, the Responses API."""

import asyncio
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
from rows import MODEL, SHORT, answer, run, works

set_tracing_disabled(True)


@function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


class City(BaseModel):
    name: Literal["Oslo", "Rome"]


def agent(address: str, kind: type, **fields: object) -> Agent:
    client = AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    fields = {"model_settings": ModelSettings(temperature=0, max_tokens=20)} | fields
    return Agent("a", model=kind(MODEL, client), **fields)


def ask(address: str, kind: type = OpenAIChatCompletionsModel, **fields: object) -> str:
    return Runner.run_sync(agent(address, kind, **fields), SHORT, max_turns=1).final_output


def text(address: str) -> None:
    assert ask(address) == answer(address, question=SHORT)


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


def responses(address: str) -> None:
    assert ask(address, OpenAIResponsesModel) == answer(address, question=SHORT)


def responses_tools(address: str) -> None:
    """The agent runs the call and sends its result back."""
    settings = ModelSettings(temperature=0, max_tokens=100, tool_choice="required", parallel_tool_calls=False)
    fields = {"tools": [weather], "model_settings": settings}
    found = ask(address, OpenAIResponsesModel, tool_use_behavior="stop_on_first_tool", **fields)
    assert found in ("sunny in Oslo", "sunny in Rome")
    result = Runner.run_sync(agent(address, OpenAIResponsesModel, **fields), SHORT, max_turns=3)
    assert [item.type for item in result.new_items][:2] == ["tool_call_item", "tool_call_output_item"]
    structured = ModelSettings(temperature=0, max_tokens=100)
    assert ask(address, OpenAIResponsesModel, output_type=City, model_settings=structured).name in ("Oslo", "Rome")


def streamed(address: str) -> None:
    async def play() -> str:
        result = Runner.run_streamed(agent(address, OpenAIResponsesModel), SHORT, max_turns=1)
        raw = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        return "".join(event.delta for event in raw if event.type == "response.output_text.delta")

    assert asyncio.run(play()) == answer(address, question=SHORT)


def previous(address: str) -> None:
    asked = agent(address, OpenAIResponsesModel, model_settings=ModelSettings(temperature=0, max_tokens=200))
    first = Runner.run_sync(asked, SHORT, max_turns=1)
    second = Runner.run_sync(asked, "Hi", max_turns=1, previous_response_id=first.last_response_id)
    used, n = second.raw_responses[0].usage, first.raw_responses[0].usage.total_tokens
    assert used.input_tokens_details.cached_tokens >= n - 1


ROWS = [
    works("OpenAIChatCompletionsModel, without tools", text),
    works("tools: a call, run by the agent", tools),
    works("output_type, also beside tools", structured),
    works("Responses API (its default)", responses),
    works("Responses API: tools, output_type", responses_tools),
    works("Responses API: streamed", streamed),
    works("Responses API: previous_response_id continues the tokens", previous),
]

if __name__ == "__main__":
    run(("openai-agents",), ROWS)
