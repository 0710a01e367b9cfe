"""`GET /kvarn/plan`: the forecast of a server, what is true so far, and the error."""

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema_rs
import pytest
from support.serving import Served, serve, tiny_model

SCHEMA = json.loads((Path(__file__).parents[2] / "src/kvarn/cli/schemas/plan.json").read_text(encoding="utf-8"))
KEY = "abc"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("planning")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVARN_CACHE", str(folder / "cache"))
        options = ("-np", "2", "-c", "256", "-b", "32", "-t", "1", "--api-key", KEY)
        with serve(tiny_model(folder), *options) as served:
            yield served


def test_forecast_and_truth(server: Served) -> None:
    before = server.ask("/kvarn/plan", key=KEY).json
    assert (before["decode"], before["prefill"]) == (None, None), "no request was computed"
    for part in ("cache", "memory", "depths"):
        jsonschema_rs.validate(SCHEMA["properties"][part], before[part])
    assert before["cache"]["sequences"] == 2
    memory = before["memory_bytes"]
    assert memory["forecast"] == before["memory"]["total"]
    assert memory["error_share"] == pytest.approx(memory["forecast"] / memory["truth"] - 1)
    assert abs(memory["error_share"]) < 0.2, "of a model of 1 MB, in a process of 60"

    body = {"prompt": "abcdefgh" * 8, "max_tokens": 9, "ignore_eos": True}
    assert server.ask("/v1/completions", body, key=KEY).status == 200
    after = server.ask("/kvarn/plan", key=KEY).json
    assert {key: after["memory"][key] for key in after["memory"]} == before["memory"], "a forecast does not change"
    decode, prefill = after["decode"], after["prefill"]
    assert (decode["steps"], decode["sequences"]) == (8, 1)
    tokens = prefill["tokens"] * prefill["steps"]
    assert decode["depth"] == tokens + 3.5, "the mean of 8 tokens, one after the other"
    assert prefill["steps"] == -(-tokens // 32)
    for each in (decode, prefill):
        pair = each["tok_s"]
        assert pair["forecast"] > 0
        assert pair["truth"] > 0
        assert pair["error_share"] == pytest.approx(pair["forecast"] / pair["truth"] - 1)


def test_it_needs_the_key(server: Served) -> None:
    assert server.ask("/kvarn/plan").status == 401
    listed = server.ask("/openapi.json").json["paths"]
    assert "get" in listed["/kvarn/plan"]


def test_other_backends_have_none(tmp_path: Path) -> None:
    with serve(tiny_model(tmp_path), "--backend", "reference", "-c", "64") as served:
        reply = served.ask("/kvarn/plan")
        assert reply.status == 404
        assert reply.error == "the reference backend has no forecast: it is for the backends cpu and cuda"
