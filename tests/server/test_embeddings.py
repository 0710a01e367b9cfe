"""Vectors over HTTP: forms of input and output, limits, and that batches change no bit."""

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.scripted import Client, serving
from support.serving import tiny_model

from kvarn import LLM

EMBED, NATIVE = "/v1/embeddings", "/embedding"
TEXTS = ["the sea", "a fox and the night", "ab"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    path: Path = tiny_model(tmp_path_factory.mktemp("model"))
    with serving(LLM(path, cache="paged", max_seqs=4, context=256, backend="cpu", max_waiting=256)) as client:
        yield client


def vectors(client: Client, path: str = EMBED, **fields: object) -> list[list[float]]:
    reply = client.ask(path, **fields)
    assert reply.status == 200, reply.body
    return [each["embedding"] for each in reply.json["data"]]


def test_vectors_are_those_of_the_python_api(client: Client) -> None:
    for pooling in ("last", "mean"):
        found = vectors(client, input=TEXTS, pooling=pooling)
        assert found == [vector.tolist() for vector in client.llm.embed(TEXTS, pooling)]
    assert vectors(client, input=TEXTS) == vectors(client, input=TEXTS, pooling="last")


def test_usage_and_form(client: Client) -> None:
    body = client.ask(EMBED, input=TEXTS, model="any").json
    n = sum(len(client.llm.tokenizer.encode(text)) for text in TEXTS)
    assert (body["object"], body["model"]) == ("list", "tiny")
    assert (body["usage"]["prompt_tokens"], body["usage"]["total_tokens"]) == (n, n)
    assert [each["index"] for each in body["data"]] == [0, 1, 2]
    assert len(body["kvarn"]["prompts"]) == 3
    (length,) = {round(sum(x * x for x in each["embedding"]), 5) for each in body["data"]}
    assert length == 1


def test_base64_has_the_same_numbers(client: Client) -> None:
    (coded,) = vectors(client, input="the sea", encoding_format="base64")
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == vectors(client, input="the sea")[0]


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ("ab", ["ab"]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        (["ab", [97]], ["ab", [97]]),
        ({"prompt_string": "ab"}, ["ab"]),
        ([97, "ab", 98], [[97, *[257], 98]]),
    ],
)
def test_forms_of_input(client: Client, given: object, same: list) -> None:
    tokens = [client.llm.tokenizer.encode(each) if isinstance(each, str) else each for each in same]
    assert vectors(client, input=given) == [vector.tolist() for vector in client.llm.embed(tokens)]


def test_a_call_may_have_more_texts_than_the_queue_has_places(client: Client) -> None:
    body = client.ask(EMBED, input=[[i % 250 + 1, 5] for i in range(1000)]).json
    assert (len(body["data"]), len(body["kvarn"]["prompts"])) == (1000, 128)
    assert [each["embedding"] for each in body["data"]] == 4 * [
        vector.tolist() for vector in client.llm.embed([[i + 1, 5] for i in range(250)])
    ]


def test_llama_cpp_has_a_list_of_vectors_for_each_text(client: Client) -> None:
    for name in ("content", "input"):
        found = client.ask(NATIVE, **{name: TEXTS}).json
        assert found == [{"index": i, "embedding": [v]} for i, v in enumerate(vectors(client, input=TEXTS))]


def test_ollama_has_two_endpoints(client: Client) -> None:
    wanted = vectors(client, input=["ab", "the sea"])
    body = client.ask("/api/embed", model="m", input=["ab", "the sea"], truncate=True, keep_alive="5m").json
    assert body["embeddings"] == wanted
    assert client.ask("/api/embed", model="m", input="ab").json["embeddings"] == wanted[:1]
    assert client.ask("/api/embeddings", model="m", prompt="ab").json == {"embedding": wanted[0]}
    assert "dimensions is 5" in client.ask("/api/embed", model="m", input="ab", dimensions=5).json["error"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (EMBED, {}, "input is missing"),
        (EMBED, {"input": []}, "input has 0; it must have at least 1 item"),
        (EMBED, {"input": 3}, "input is 3; it must be"),
        (EMBED, {"input": [[]]}, "input[0] has 0"),
        (EMBED, {"input": [None]}, "input[0] is null"),
        (EMBED, {"input": [1.5]}, "input[0] is 1.5"),
        (EMBED, {"input": ""}, "the prompt is empty"),
        (EMBED, {"input": [400]}, "an id outside the vocabulary"),
        (EMBED, {"input": "x" * 300}, "this server's context is 256 tokens"),
        (EMBED, {"input": ["a"] * 2049}, "input has 2049 texts; give at most 2048"),
        (EMBED, {"input": "a", "dimensions": 3}, "dimensions is 3; vectors of this model have 128"),
        (EMBED, {"input": "a", "pooling": "cls"}, 'pooling is "cls"; it must be one of "last", "mean"'),
        (EMBED, {"input": "a", "encoding_format": "int8"}, "encoding_format is"),
        (EMBED, {"input": "a", "stream": True}, "stream is not implemented here"),
        (EMBED, {"input": {"prompt_string": "a", "multimodal_data": ["b"]}}, "multimodal_data is not implemented"),
        (NATIVE, {}, "give content or input"),
        (NATIVE, {"content": "a", "input": "a"}, "give content or input"),
    ],
)
def test_bad_input(client: Client, path: str, body: dict, message: str) -> None:
    reply = client.ask(path, **body)
    assert reply.status == 400, reply.body
    assert message in reply.error


def test_the_size_of_the_models_vectors_may_be_asked_for(client: Client) -> None:
    assert vectors(client, input="ab", dimensions=128) == vectors(client, input="ab")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/reranking", "/v1/score"])
def test_rerankers_are_refused_by_name(client: Client, path: str) -> None:
    reply = client.ask(path, query="a", documents=["b"])
    assert (reply.status, "rerank is not implemented" in reply.error) == (400, True)


def test_a_client_that_leaves_frees_its_texts(client: Client) -> None:
    client.ask(EMBED, leave_at=0, input=[[5, i + 1, *range(1, 200)] for i in range(50)])
    client.until(lambda: not client.llm.engine.busy)
    assert client.llm.cache.usage().sequences == 0
