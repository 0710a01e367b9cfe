"""Prometheus metrics: what is observed when a step, a token or a request ends. engine_metrics.py reads the rest.

Metrics that vLLM has, too, have its names, labels, units and buckets, so its dashboards work with
`prefix="vllm"`. All others are called `kvarn:`, with either prefix. Only this file and engine_metrics.py use
Prometheus.
"""

from collections.abc import Sequence
from inspect import signature
from itertools import takewhile

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from kvarn.engine.engine import Engine
from kvarn.engine.request import Request
from kvarn.server.engine_metrics import LABELS, EngineCollector, values
from kvarn.server.ignored import Ignored
from kvarn.server.protocols import PROTOCOLS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Newer versions write : in the names of samples as _ unless they are told not to. Older versions have no such setting.
NEWER = "escaping" in signature(openmetrics.generate_latest).parameters
AS_THEY_ARE = {"escaping": "allow-utf-8"} if NEWER else {}
FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
SECONDS = (0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, *SECONDS, 160, 640, 2560)
GAPS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, *SECONDS)
WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEPS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COUNTS = (1, 2, 5, 10, 20)


def token_buckets(context: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to the context."""
    steps = (float(first * 10**power) for power in range(12) for first in (1, 2, 5))
    return tuple(takewhile(lambda step: step <= context, steps))


def histograms(context: int) -> dict[str, tuple[str, tuple[float, ...]]]:
    tokens = token_buckets(context)
    return {
        "time_to_first_token_seconds": ("from the arrival of a request to its first token", FIRST),
        "inter_token_latency_seconds": ("between two tokens of one answer", GAPS),
        "request_time_per_output_token_seconds": ("mean time of a token after the first, by request", GAPS),
        "e2e_request_latency_seconds": ("from the arrival of a request to its end", WHOLE),
        "request_queue_time_seconds": ("waiting to be admitted", WHOLE),
        "request_inference_time_seconds": ("from admission to the end", WHOLE),
        "request_prefill_time_seconds": ("from admission to the first token", WHOLE),
        "request_decode_time_seconds": ("from the first token to the last", WHOLE),
        "request_prompt_tokens": ("prompt tokens of a request", tokens),
        "request_generation_tokens": ("tokens of an answer", tokens),
        "request_max_num_generation_tokens": ("tokens of the longest answer of a request", tokens),
        "request_prefill_kv_computed_tokens": ("prompt tokens of a request that were not reused", tokens),
        "request_params_n": ("n of a request", COUNTS),
        "request_params_max_tokens": ("max_tokens of a request", tokens),
        "iteration_tokens_total": ("tokens computed in a step", STEPS),
    }


def ignored_fields() -> list[str]:
    """Of all protocols: the fields that are accepted without effect."""
    fields = (address.fields for protocol in PROTOCOLS for address in protocol.addresses)
    return sorted({name for each in fields if each is not None for name in each.ignored})


class Metrics:
    """`prefix`: of the metrics that vLLM has, too."""

    def __init__(self, engine: Engine, model: str, prefix: str = "kvarn") -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._labels = values(model)
        self._observed = {
            name: Histogram(f"{prefix}:{name}", what, LABELS, buckets=buckets, registry=self._registry).labels(
                *self._labels
            )
            for name, (what, buckets) in histograms(engine.cache.longest).items()
        }
        self._success = Counter(
            f"{prefix}:request_success",
            "requests that ended, by reason",
            [*LABELS, "finished_reason"],
            registry=self._registry,
        )
        for reason in FINISHED.values():
            self._success.labels(*self._labels, reason)
        self._ignored = Counter(
            "kvarn:ignored_fields",
            "parts of requests that were accepted without effect",
            [*LABELS, "field"],
            registry=self._registry,
        )
        for name in ignored_fields():
            self._ignored.labels(*self._labels, name)
        self._registry.register(EngineCollector(engine, model, prefix))
        ProcessCollector(registry=self._registry)

    def ignored(self, parts: Sequence[Ignored]) -> None:
        for part in parts:
            self._ignored.labels(*self._labels, part.field).inc()

    def stepped(self, n_tokens: int) -> None:
        self._observe("iteration_tokens_total", n_tokens)

    def token(self, gap: float | None) -> None:
        if gap is not None:
            self._observe("inter_token_latency_seconds", gap)

    def finished(self, request: Request) -> None:
        """Observe the stages that the request reached."""
        reasons = [sample.finish_reason or "cancelled" for sample in request.samples]
        worst = max(reasons, key=list(FINISHED).index)
        self._success.labels(*self._labels, FINISHED[worst]).inc()
        self._times(request)
        self._tokens(request)

    def _times(self, request: Request) -> None:
        t = request.timing
        for name, start, stop in (
            ("time_to_first_token_seconds", t.queued_at, t.first_token_at),
            ("e2e_request_latency_seconds", t.queued_at, t.finished_at),
            ("request_queue_time_seconds", t.queued_at, t.started_at),
            ("request_inference_time_seconds", t.started_at, t.finished_at),
            ("request_prefill_time_seconds", t.started_at, t.first_token_at),
            ("request_decode_time_seconds", t.first_token_at, t.finished_at),
        ):
            if start is not None and stop is not None:
                self._observe(name, stop - start)
        longest = max(sample.n_output for sample in request.samples)
        if t.first_token_at is not None and t.finished_at is not None and longest > 1:
            mean = (t.finished_at - t.first_token_at) / (longest - 1)
            self._observe("request_time_per_output_token_seconds", mean)

    def _tokens(self, request: Request) -> None:
        outputs = [sample.n_output for sample in request.samples]
        self._observe("request_prompt_tokens", len(request.prompt))
        self._observe("request_max_num_generation_tokens", max(outputs))
        self._observe("request_params_n", request.params.n)
        self._observe("request_params_max_tokens", request.params.max_tokens or 0)
        for n in outputs:
            self._observe("request_generation_tokens", n)
        if request.timing.first_token_at is not None:
            reused = request.adoption.reused if request.adoption else 0
            self._observe("request_prefill_kv_computed_tokens", len(request.prompt) - reused)

    def _observe(self, name: str, value: float) -> None:
        self._observed[name].observe(value)

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics and their content type: OpenMetrics for a client that accepts it, else Prometheus's text."""
        if any(each.split(";")[0].strip() == "application/openmetrics-text" for each in accept.split(",")):
            page: bytes = openmetrics.generate_latest(self._registry, **AS_THEY_ARE)  # type: ignore[no-untyped-call]
            return page, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry), CONTENT_TYPE
