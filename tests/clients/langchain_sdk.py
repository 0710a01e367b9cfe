"""langchain-openai: ChatOpenAI, OpenAI, and what it builds on tools."""

import asyncio
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from rows import FOX, MODEL, QUESTION, answer, continued, run, works


class City(BaseModel):
    """A city."""

    name: Literal["Oslo", "Rome"]


def model(address: str, **fields: object) -> ChatOpenAI:
    given = {"model": MODEL, "temperature": 0, "max_tokens": 20, "max_retries": 0} | fields
    return ChatOpenAI(base_url=f"{address}/v1", api_key="none", **given)


def invoke(address: str) -> None:
    found = model(address).invoke(QUESTION)
    assert found.content == answer(address)
    assert found.usage_metadata["output_tokens"] > 3
    assert "cache_read" in found.usage_metadata["input_token_details"]


def stream(address: str) -> None:
    chunks = list(model(address, stream_usage=True).stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == answer(address)
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) > 3


def astream(address: str) -> None:
    async def play() -> str:
        return "".join([chunk.content async for chunk in model(address).astream(QUESTION)])

    assert asyncio.run(play()) == answer(address)


def batch(address: str) -> None:
    assert len(model(address).batch([QUESTION, "Who are you?", "What is water?"])) == 3


def completion(address: str) -> None:
    llm = OpenAI(base_url=f"{address}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=5, max_retries=0)
    assert llm.invoke(FOX) == continued(address)


def embeddings(address: str) -> None:
    maker = OpenAIEmbeddings(base_url=f"{address}/v1", api_key="none", check_embedding_ctx_length=False)
    first, second = maker.embed_documents(["The sea", "The sky"])
    assert maker.embed_query("The sea") == first != second


def tools(address: str) -> None:
    bound = model(address, max_tokens=100).bind_tools([City], tool_choice="any", parallel_tool_calls=False)
    found = bound.invoke(QUESTION)
    (call, *_) = found.tool_calls
    assert call["args"]["name"] in ("Oslo", "Rome")
    joined = None
    for chunk in bound.stream(QUESTION):
        joined = chunk if joined is None else joined + chunk
    assert [each["args"] for each in joined.tool_calls] == [each["args"] for each in found.tool_calls]
    turns = [HumanMessage(QUESTION), found, ToolMessage("yes", tool_call_id=call["id"])]
    model(address).bind_tools([City]).invoke(turns)


ROWS = [
    works("invoke, with cached tokens", invoke),
    works("stream, usage in the stream", stream),
    works("astream", astream),
    works("batch", batch),
    works("OpenAI() completion", completion),
    works("bind_tools, whole and streamed, ToolMessage", tools),
    works("with_structured_output, tools", lambda a: _structured(a, "function_calling")),
    works("with_structured_output, json_schema", lambda a: _structured(a, "json_schema")),
    works("OpenAIEmbeddings", embeddings),
]


def _structured(address: str, method: str) -> None:
    found = model(address, max_tokens=100).with_structured_output(City, method=method).invoke(QUESTION)
    assert found.name in ("Oslo", "Rome")


if __name__ == "__main__":
    run(("langchain-openai",), ROWS)
