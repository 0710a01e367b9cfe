"""Prometheus metrics of the engine and the cache. The names are those of vLLM, so its dashboards work.

A scrape reads the counters of the engine and the cache. Only the times of requests are collected here.
Usage is a fraction from 0 to 1. Prefix queries and hits count tokens. No other file uses Prometheus.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvarn.engine.engine import Engine
from kvarn.engine.request import Request

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
REQUESTS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)

HISTOGRAMS = {
    "time_to_first_token_seconds": ("from the arrival of a request to its first token", SECONDS),
    "inter_token_latency_seconds": ("between two tokens of one answer", GAPS),
    "e2e_request_latency_seconds": ("from the arrival of a request to its end", REQUESTS),
    "request_queue_time_seconds": ("waiting to be admitted", REQUESTS),
    "request_prefill_time_seconds": ("from admission to the first token", REQUESTS),
    "request_decode_time_seconds": ("from the first token to the last", REQUESTS),
}


class Metrics:
    def __init__(self, engine: Engine, model: str, prefix: str = "kvarn") -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._times = {
            name: Histogram(f"{prefix}:{name}", what, ["model_name"], buckets=buckets, registry=self._registry).labels(
                model
            )
            for name, (what, buckets) in HISTOGRAMS.items()
        }
        self._success = Counter(
            f"{prefix}:request_success",
            "requests that ended, by reason",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        for reason in FINISHED.values():
            self._success.labels(model, reason)
        self._model = model
        self._registry.register(_EngineCollector(engine, model, prefix))
        ProcessCollector(registry=self._registry)

    def token(self, gap: float | None) -> None:
        if gap is not None:
            self._times["inter_token_latency_seconds"].observe(gap)

    def finished(self, request: Request) -> None:
        """Observe the times of the stages that the request reached."""
        t = request.timing
        reasons = [sample.finish_reason or "cancelled" for sample in request.samples]
        worst = max(reasons, key=list(FINISHED).index)
        self._success.labels(self._model, FINISHED[worst]).inc()
        for name, start, stop in (
            ("time_to_first_token_seconds", t.queued_at, t.first_token_at),
            ("e2e_request_latency_seconds", t.queued_at, t.finished_at),
            ("request_queue_time_seconds", t.queued_at, t.started_at),
            ("request_prefill_time_seconds", t.started_at, t.first_token_at),
            ("request_decode_time_seconds", t.first_token_at, t.finished_at),
        ):
            if start is not None and stop is not None:
                self._times[name].observe(stop - start)

    def page(self) -> bytes:
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engine at a scrape. Only one thread writes the counters, so no lock is needed."""

    def __init__(self, engine: Engine, model: str, prefix: str) -> None:
        self._engine = engine
        self._model = model
        self._prefix = prefix

    def describe(self) -> Iterable[Metric]:
        return ()  # then the registry does not scrape once to learn the names

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._cache()
        yield from self._kernels()

    def _gauge(self, name: str, what: str, value: float, **labels: str) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", what, labels=["model_name", *labels])
        family.add_metric([self._model, *labels.values()], value)
        return family

    def _counter(self, name: str, what: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}:{name}", what, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counters(self, name: str, what: str, label: str, values: dict[str, float]) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}:{name}", what, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model, key], value)
        return family

    def _requests(self) -> Iterator[Metric]:
        stats, scheduler = self._engine.stats, self._engine.scheduler
        running = {id(sample.request) for sample in list(scheduler.running)}
        waiting = {id(sample.request) for sample in list(scheduler.waiting)} - running
        yield self._gauge("num_requests_running", "requests being computed", len(running))
        yield self._gauge("num_requests_waiting", "requests waiting for room", len(waiting))
        preemptions = scheduler.n_preemptions
        yield self._counter("num_preemptions", "samples preempted to make room for older ones", preemptions)
        yield self._counter("prompt_tokens", "prompt tokens of answered requests", stats.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "prompt tokens reused from the cache", stats.cached_tokens)
        yield self._counter("generation_tokens", "tokens sampled", stats.generated_tokens)

    def _cache(self) -> Iterator[Metric]:
        usage, plan = self._engine.cache.usage(), self._engine.cache.plan
        kind = {"strategy": plan.strategy.name, "codec": plan.codec.name}
        yield self._gauge("kv_cache_usage_perc", "blocks in use, 0 to 1", usage.blocks_used / usage.blocks)
        yield self._gauge("kv_cache_bytes", "bytes of keys and values that are allocated", usage.nbytes, **kind)
        yield self._gauge("kv_cache_blocks", "blocks that are allocated", usage.blocks)
        yield self._gauge("kv_cache_blocks_cached", "unreferenced blocks kept for reuse", usage.blocks_cached)
        yield self._gauge("kv_cache_resident_tokens", "tokens in blocks, each counted once", usage.tokens_resident)
        yield self._counter("prefix_cache_queries", "prompt tokens looked up", usage.prefix_queries)
        yield self._counter("prefix_cache_hits", "prompt tokens found", usage.prefix_hits)
        misses = {reason.value: float(n) for reason, n in usage.prefix_misses.items()}
        yield self._counters("kv_cache_misses", "prompts, by the reason why reuse ended", "reason", misses)
        yield self._counter("kv_cache_evictions", "cached blocks evicted", usage.blocks_evicted)

    def _kernels(self) -> Iterator[Metric]:
        counters = self._engine.memory.counters
        seconds, calls = dict(counters.seconds), {k: float(n) for k, n in dict(counters.calls).items()}
        yield self._counters("attention_seconds", "time in attention, by kernel", "kernel", seconds)
        yield self._counters("attention_kernel_calls", "calls, by kernel", "kernel", calls)
        yield self._counter("kv_cache_read_bytes", "bytes read from cells by attention", counters.read)
        yield self._counter("kv_cache_written_bytes", "bytes written to cells", counters.written)
        yield self._counter("kv_cache_copied_bytes", "bytes copied from cells to cells", counters.copied)
