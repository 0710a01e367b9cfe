"""Counters are real: known traffic, exact values."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from support.serving import Served, serve, tiny_model
from support.tiny_models import GOLDEN
from support.vllm_dashboards import SERIES

DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"
ROW = GOLDEN.n_layers * 2 * GOLDEN.n_kv_heads * GOLDEN.head_dim * 2  # bytes of one token: K and V, bf16
HISTOGRAMS = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_prefill_kv_computed_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "iteration_tokens_total",
]
VLLM = [  # the metrics that vLLM has, too
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    "num_requests_running",
    "num_requests_waiting",
    "num_preemptions_total",
    "request_success_total",
    "cache_config_info",
    *(f"{name}_count" for name in HISTOGRAMS),
]
OWN = [
    "kv_cache_bytes",
    "kv_cache_blocks",
    "kv_cache_blocks_cached",
    "kv_cache_resident_tokens",
    "kv_cache_misses_total",
    "kv_cache_evictions_total",
    "kv_tier_bytes",
    "kv_tier_reads_total",
    "kv_tier_writes_total",
    "kv_tier_drops_total",
    "attention_seconds_total",
    "attention_kernel_calls_total",
    "kv_cache_read_bytes_total",
    "kv_cache_written_bytes_total",
    "kv_cache_copied_bytes_total",
    "sampled_tokens_total",
    "steps_ahead_total",
    "ignored_fields_total",
]
BUCKETS = {  # the first and the last finite bucket in vLLM, and how many there are
    "time_to_first_token_seconds": (0.001, 2560, 22),
    "inter_token_latency_seconds": (0.01, 80, 19),
    "request_time_per_output_token_seconds": (0.01, 80, 19),
    "e2e_request_latency_seconds": (0.3, 7680, 21),
    "request_prompt_tokens": (1, 2000, 11),
    "request_params_n": (1, 20, 5),
    "iteration_tokens_total": (1, 16384, 13),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny_model(tmp_path_factory.mktemp("model"), 4096)
    # The reference counts every kernel's time; chunks without a decode beside them are part of the traffic.
    with serve(model, "--alias", "tiny", "-np", "2", "-b", "64", "--host-cache", "1M") as served:
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
    assert value("external_prefix_cache_queries_total") == 316 - 149, "what the cache did not have itself"
    assert value("external_prefix_cache_hits_total") == value("kv_tier_bytes", tier="host") == 0
    for what in ("reads", "writes", "drops"):
        assert value(f"kv_tier_{what}_total", tier="host") == 0, "nothing was evicted"
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
    assert value("sampled_tokens_total", where="backend") == value("generation_tokens_total")
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


def test_tokens_and_parameters_of_requests(server: Served) -> None:
    def value(name: str) -> float:
        return server.metric(f"kvarn:{name}", model_name="tiny", engine="0")

    names = [f"{name}_{part}" for name in HISTOGRAMS if "seconds" not in name for part in ("sum", "count")]
    before = {name: value(name) for name in names}
    prompt = [241, 242, 243, 244, 245] * 20  # in steps of 64
    body = {"prompt": prompt, "max_tokens": 7, "temperature": 0, "ignore_eos": True}
    assert server.ask("/v1/completions", body).status == 200
    assert server.ask("/v1/completions", body | {"n": 2, "max_tokens": 4}).status == 200
    grown = {name: value(name) - before[name] for name in names}
    assert [grown[f"request_prompt_tokens_{part}"] for part in ("sum", "count")] == [200, 2]
    assert [grown[f"request_generation_tokens_{part}"] for part in ("sum", "count")] == [7 + 4 + 4, 3]
    assert [grown[f"request_max_num_generation_tokens_{part}"] for part in ("sum", "count")] == [7 + 4, 2]
    assert [grown[f"request_prefill_kv_computed_tokens_{part}"] for part in ("sum", "count")] == [100 + 1, 2]
    assert [grown[f"request_params_n_{part}"] for part in ("sum", "count")] == [3, 2]
    assert [grown[f"request_params_max_tokens_{part}"] for part in ("sum", "count")] == [11, 2]
    steps = (2 + 6, 1 + 3)  # the prompt in two steps or one, then one token of each answer in a step
    assert [grown[f"iteration_tokens_total_{part}"] for part in ("sum", "count")] == [100 + 6 + 1 + 2 * 3, sum(steps)]


@pytest.mark.requirement(37)
def test_names_that_dashboards_know(server: Served) -> None:
    page = server.ask("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = page.body.decode()
    for name in (*VLLM, *OWN):
        assert re.search(rf"^kvarn:{name}\{{.*model_name=\"tiny\"", text, re.M), name
    assert "process_resident_memory_bytes" in text


def test_every_metric_is_tested_and_documented(server: Served) -> None:
    page = server.ask("/metrics").body.decode()
    shown = {name for name in re.findall(r"^# TYPE kvarn:(\w+) ", page, re.M) if not name.endswith("_created")}
    assert shown == {name.removesuffix("_count") for name in (*VLLM, *OWN)}
    for name in shown:
        assert re.search(rf"`{name}[`{{]", DOCUMENT.read_text()), f"{name} is not in docs/serving.md"


@pytest.fixture(scope="module")
def like_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny_model(tmp_path_factory.mktemp("model"), 2048)
    with serve(model, "--alias", "tiny", "--host-cache", "1M", "--metrics-prefix", "vllm") as served:
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        assert served.ask("/v1/completions", body).status == 200
        yield served


def scraped(server: Served, accept: str) -> tuple[str, dict[str, list]]:
    """The samples of a scrape, by name, as the client library of Prometheus reads them."""
    with contextlib.closing(server.connection()) as connection:
        connection.request("GET", "/metrics", headers={"Accept": accept})
        response = connection.getresponse()
        kind, text = response.headers["content-type"], response.read().decode()
    parse = openmetrics.text_string_to_metric_families if "openmetrics" in kind else text_string_to_metric_families
    found: dict[str, list] = {}
    for family in parse(text):
        assert family.documentation, family.name
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return kind, found


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", "text/plain; version=0.0.4"),
        ("text/plain;version=0.0.4;q=0.3,*/*;q=0.1", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.3", "application/openmetrics-text"),
    ],
)
def test_every_panel_of_vllms_dashboards_has_data(like_vllm: Served, accept: str, kind: str) -> None:
    got, found = scraped(like_vllm, accept)
    assert got.startswith(kind)
    for name, labels in SERIES.items():
        samples = found[f"vllm:{name}"]
        assert all(labels == set(sample.labels) - {"le"} for sample in samples), name
        assert {sample.labels["model_name"] for sample in samples} == {"tiny"}
        moves = name not in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
        assert not moves or sum(sample.value for sample in samples) > 0, name
    for name, (first, last, n) in BUCKETS.items():
        bounds = [float(sample.labels["le"]) for sample in found[f"vllm:{name}_bucket"]]
        assert (bounds[0], bounds[-2], len(bounds)) == (first, last, n + 1), name
    (info,) = found["vllm:cache_config_info"]
    assert {"block_size": "32", "cache_dtype": "bf16", "enable_prefix_caching": "True"}.items() <= info.labels.items()
    assert info.labels["num_gpu_blocks"] == str(8 * 2048 // 32)


def test_names_that_vllm_does_not_have_stay_our_own(like_vllm: Served) -> None:
    _, found = scraped(like_vllm, "*/*")
    ours = {name.removeprefix("kvarn:") for name in found if name.startswith("kvarn:")}
    assert {name for name in ours if not name.endswith("_created")} == set(OWN)
    theirs = {name for name in found if name.startswith("vllm:")}
    assert {f"vllm:{name}" for name in VLLM} <= theirs
    assert not {f"vllm:{name}" for name in OWN} & theirs
