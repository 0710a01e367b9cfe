"""openai-agents: with chat completions, and with its default, the Responses API."""

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
from rows import MODEL, QUESTION, answer, refused, run, works

set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def ask(address: str, kind: type = OpenAIChatCompletionsModel, **fields: object) -> str:
    client = AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    settings = ModelSettings(temperature=0, max_tokens=20)
    agent = Agent("a", model=kind(MODEL, client), model_settings=settings, **fields)
    return Runner.run_sync(agent, QUESTION, max_turns=1).final_output


def text(address: str) -> None:
    assert ask(address) == answer(address)


ROWS = [
    works("OpenAIChatCompletionsModel, without tools", text),
    refused("tools", lambda a: ask(a, tools=[weather])),
    refused("Responses API (its default)", lambda a: ask(a, OpenAIResponsesModel)),
]

if __name__ == "__main__":
    run(("openai-agents",), ROWS)
