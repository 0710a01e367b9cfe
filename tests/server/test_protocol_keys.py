"""Every endpoint of every protocol needs a key if the server has keys, but for a few that say nothing; and no text of
one key reaches another."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.scripted import HERMES, HERMES_CONTROL, Client, scripted_model, serving

from kvarn import LLM
from kvarn.server.access import Access
from kvarn.server.protocols import PROTOCOLS

OPEN = {"/v1/health", "/api/version"}
SECRET = "the word is swordfish and nobody knows it"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    path = scripted_model(tmp_path_factory.mktemp("model") / "m.gguf", HERMES, HERMES_CONTROL)
    llm = LLM(path, cache="paged", max_seqs=4, context=256, backend="cpu", block_size=16)
    with serving(llm, Access(["alice", "bob"])) as client:
        yield client


def send(client: Client, method: str, path: str, key: str) -> Any:
    return {"GET": client.get, "DELETE": client.delete, "POST": client.ask}[method](path, key=key)


@pytest.mark.parametrize(("method", "path"), [(each.method, each.path) for p in PROTOCOLS for each in p.addresses])
def test_endpoints_need_a_key(client: Client, method: str, path: str) -> None:
    path = path.replace("{id}", "x").replace("{id:path}", "x")
    assert (send(client, method, path, "").status == 401) is (path not in OPEN)
    assert send(client, method, path, "mallory").status == (200 if path in OPEN else 401)
    assert send(client, method, path, "alice").status != 401


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": f"1 {SECRET}", "n_predict": 2}),
        ("/completion", {"prompt": f"2 {SECRET}", "n_predict": 0}),
        ("/v1/embeddings", {"input": f"3 {SECRET}"}),
        ("/api/generate", {"model": "m", "prompt": f"4 {SECRET}", "raw": True, "stream": False}),
    ],
)
def test_keys_share_no_prefixes_and_no_texts(client: Client, path: str, body: dict) -> None:
    for expected in (False, True):
        reply = client.ask(path, key="alice", **body)
        assert (reply.json["kvarn"]["reused_tokens"] > 20) is expected
    for about in ("/slots", "/kvarn/cache", "/props", "/api/ps"):
        assert b"swordfish" not in client.get(about, key="bob").body
    told = client.ask(path, key="bob", **body).json["kvarn"]
    assert (told["reused_tokens"], told["reuse_ended"]["reason"]) == (0, "nothing shared")
