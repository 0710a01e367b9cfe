"""An odd value in every place of a valid body of llama.cpp's, Ollama's and the embeddings' endpoints: no request gets a
500, and every refusal is one line."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from support.scripted import HERMES, HERMES_CONTROL, Client, scripted_model, serving

from kvarn import LLM

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"function": {"name": "look", "arguments": {"city": "Oslo"}}}
SAMPLING = {
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "repeat_penalty": 1.1,
    "presence_penalty": 0.1,
    "seed": 3,
    "stop": ["zz"],
    "n_predict": 2,
    "n_cmpl": 1,
    "logit_bias": [[5, 1], ["ab", False]],
    "n_probs": 2,
    "ignore_eos": True,
    "stream": False,
    "return_tokens": True,
    "timings_per_token": True,
    "id_slot": 0,
    "response_fields": ["content"],
    "samplers": ["top_k"],
    "cache_prompt": True,
    "grammar": 'root ::= "a"',
}
BODIES: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": [97, "b", {"prompt_string": "c"}], **SAMPLING},
    "/infill": {
        "input_prefix": "a",
        "input_suffix": "b",
        "input_extra": [{"filename": "x", "text": "y"}],
        "prompt": "c",
        "n_predict": 2,
    },
    "/embedding": {"content": ["a", [97, "b"]], "pooling": "mean", "embd_normalize": 2},
    "/v1/embeddings": {"input": ["a", [97]], "encoding_format": "base64", "pooling": "last", "dimensions": 128},
    "/apply-template": {"messages": [{"role": "user", "content": "a"}], "tools": [LOOK], "add_generation_prompt": True},
    "/tokenize": {"content": "a", "add_special": True, "parse_special": True, "with_pieces": True},
    "/v1/completions": {"prompt": "a", "suffix": "b", "prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 2},
    "/api/chat": {
        "model": "m",
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [CALL]},
            {"role": "tool", "tool_name": "look", "content": "b"},
        ],
        "tools": [LOOK],
        "options": {"num_predict": 2, "temperature": 0.5, "stop": ["zz"], "num_ctx": 5},
        "think": True,
        "format": "",
        "logprobs": True,
        "top_logprobs": 1,
        "keep_alive": "5m",
    },
    "/api/generate": {"model": "m", "prompt": "a", "system": "s", "raw": False, "options": {"num_predict": 2}},
    "/api/embed": {"model": "m", "input": ["a"], "truncate": True, "options": {}},
    "/api/show": {"model": "m", "verbose": True},
}
DEEP: Any = []
for _ in range(60):
    DEEP = [DEEP]
ODD: list[Any] = [
    None,
    True,
    -1,
    2**70,
    1e300,
    0.5,
    "",
    "\ud7ff\u0000",
    "x" * 2000,
    [],
    {},
    [[]],
    DEEP,
    {"a": {}},
    [None],
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    path = scripted_model(tmp_path_factory.mktemp("model") / "m.gguf", HERMES, (*HERMES_CONTROL, *FIM))
    with serving(LLM(path, cache="paged", max_seqs=4, context=256, backend="cpu")) as client:
        yield client


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@pytest.mark.parametrize("path", BODIES)
def test_no_request_gets_a_500(client: Client, path: str) -> None:
    whole = client.ask(path, **BODIES[path])
    assert whole.status == 200, whole.body
    for *outer, last in places(BODIES[path]):
        for odd in ODD:
            body = copy.deepcopy(BODIES[path])
            inner: Any = body
            for key in outer:
                inner = inner[key]
            inner[last] = odd
            reply = client.ask(path, **body)
            assert reply.status in (200, 400), (reply.body, body)
            if reply.status == 400:
                error = reply.json["error"]
                assert "\n" not in (error if isinstance(error, str) else error["message"])
