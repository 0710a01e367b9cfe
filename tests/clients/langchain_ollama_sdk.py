"""langchain-ollama: ChatOllama, OllamaLLM, OllamaEmbeddings."""

from typing import Literal

from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from pydantic import BaseModel
from rows import MODEL, QUESTION, answer, run, works


class City(BaseModel):
    """A city."""

    name: Literal["Oslo", "Rome"]


def model(address: str, tokens: int = 20) -> ChatOllama:
    return ChatOllama(model=MODEL, base_url=address, temperature=0, num_predict=tokens)


def invoke(address: str) -> None:
    found = model(address).invoke(QUESTION)
    assert found.content == answer(address)
    assert found.usage_metadata["output_tokens"] > 3


def stream(address: str) -> None:
    assert "".join(chunk.content for chunk in model(address).stream(QUESTION)) == answer(address)


def structured(address: str) -> None:
    found = model(address, 60).with_structured_output(City, method="json_schema").invoke(QUESTION)
    assert found.name in ("Oslo", "Rome")


def tools(address: str) -> None:
    model(address).bind_tools([City]).invoke(QUESTION)


def text(address: str) -> None:
    llm = OllamaLLM(model=MODEL, base_url=address, temperature=0, num_predict=20)
    assert llm.invoke(QUESTION) == answer(address)


def embeddings(address: str) -> None:
    found = OllamaEmbeddings(model=MODEL, base_url=address).embed_documents(["The sea", "The sky"])
    assert len(found) == 2


ROWS = [
    works("ChatOllama: invoke, with usage", invoke),
    works("ChatOllama: stream", stream),
    works("ChatOllama: with_structured_output, json_schema", structured),
    works("ChatOllama: bind_tools", tools),
    works("OllamaLLM", text),
    works("OllamaEmbeddings", embeddings),
]

if __name__ == "__main__":
    run(("langchain-ollama",), ROWS)
