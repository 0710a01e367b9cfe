"""Counters are real: known traffic, exact values."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.serving import Served, serve, tiny_model
from support.tiny_models import GOLDEN

DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"
ROW = GOLDEN.n_layers * 2 * GOLDEN.n_kv_heads * GOLDEN.head_dim * 2  # bytes of one token: K and V, bf16
NAMES = [
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    "num_requests_running",
    "num_requests_waiting",
    "num_preemptions_total",
    "request_success_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_count",
    "request_prefill_time_seconds_count",
    "request_decode_time_seconds_count",
    "kv_cache_bytes",
    "kv_cache_blocks",
    "kv_cache_blocks_cached",
    "kv_cache_resident_tokens",
    "kv_cache_misses_total",
    "kv_cache_evictions_total",
    "attention_seconds_total",
    "attention_kernel_calls_total",
    "kv_cache_read_bytes_total",
    "kv_cache_written_bytes_total",
    "kv_cache_copied_bytes_total",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny_model(tmp_path_factory.mktemp("model"), 4096)
    # The reference counts every kernel's time; chunks without a decode beside them are part of the traffic.
    with serve(model, "--alias", "tiny", "-np", "2", "-b", "64") as served:
        yield served


@pytest.mark.requirement(37)
def test_known_traffic_gives_exact_values(server: Served) -> None:
    def value(name: str, **labels: str) -> float:
        return server.metric(f"kvarn:{name}", model_name="tiny", **labels)

    def ask(prompt: list[int], max_tokens: int) -> None:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        assert server.ask("/v1/completions", body).status == 200

    text = [(7 * i) % 250 for i in range(100)]
    ask(text, 10)  # nothing is known yet
    ask(text, 1)  # 99 of 100 are
    ask([*text[:50], 251, *text[51:]], 5)  # differs at 50
    ask([252] * 8, 3)  # nothing in common with what came before
    with server.start({"prompt": [253] * 8, "max_tokens": 4000, "ignore_eos": True}):
        pass  # and one that leaves
    server.until_idle()

    assert value("prefix_cache_queries_total") == 100 + 100 + 100 + 8 + 8
    assert value("prefix_cache_hits_total") == 99 + 50
    assert value("prompt_tokens_total") == 316
    assert value("prompt_tokens_cached_total") == 149
    assert value("request_success_total", finished_reason="length") == 4
    assert value("request_success_total", finished_reason="abort") == 1
    assert value("request_success_total", finished_reason="stop") == 0
    assert value("kv_cache_misses_total", reason="nothing shared") == 3
    assert value("kv_cache_misses_total", reason="differs") == 1
    assert value("kv_cache_misses_total") == 4
    assert value("kv_cache_evictions_total") == value("num_preemptions_total") == 0
    assert value("kv_cache_usage_perc") == value("num_requests_running") == value("num_requests_waiting") == 0

    left = value("generation_tokens_total") - (10 + 1 + 5 + 3)  # tokens of the one that left
    assert 1 <= left < 4000
    assert value("inter_token_latency_seconds_count") == 9 + 0 + 4 + 2 + (left - 1)
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert value(f"{name}_seconds_count") == 5

    computed = (100 + 9) + 1 + (50 + 4) + (8 + 2) + (8 + left - 1)
    assert value("kv_cache_written_bytes_total") == computed * ROW
    assert value("kv_cache_copied_bytes_total") == (3 + 18) * ROW, "parts of blocks: 99 = 3 * 32 + 3, 50 = 32 + 18"
    prefills = 2 + 1 + 1 + 1  # 100 tokens in steps of 64; one token is a decode
    assert value("attention_kernel_calls_total", kernel="prefill") == prefills * GOLDEN.n_layers
    assert value("attention_kernel_calls_total", kernel="decode") == (9 + 1 + 4 + 2 + left - 1) * GOLDEN.n_layers
    assert value("attention_seconds_total") > 0
    assert value("kv_cache_bytes", strategy="paged", codec="bf16") == 2 * 4096 * ROW
    resident = 109 + (104 - 32) + 10 + (8 + left - 1)  # what the third shares with the first is copied from block 1 on
    assert value("kv_cache_resident_tokens") == resident


@pytest.mark.requirement(37)
def test_names_that_dashboards_know(server: Served) -> None:
    page = server.ask("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = page.body.decode()
    for name in NAMES:
        assert re.search(rf"^kvarn:{name}\{{.*model_name=\"tiny\"", text, re.M), name
    assert "process_resident_memory_bytes" in text


def test_every_metric_is_tested_and_documented(server: Served) -> None:
    page = server.ask("/metrics").body.decode()
    shown = {name for name in re.findall(r"^# TYPE kvarn:(\w+) ", page, re.M) if not name.endswith("_created")}
    assert shown == {name.removesuffix("_count") for name in NAMES}
    for name in shown:
        assert re.search(rf"`{name}[`{{]", DOCUMENT.read_text()), f"{name} is not in docs/serving.md"
