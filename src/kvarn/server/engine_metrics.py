"""Prometheus metrics that are read from the engine and the cache at a scrape.

Usage is a fraction from 0 to 1. Prefix queries and hits count tokens.
"""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvarn.engine.engine import Engine

LABELS = ("model_name", "engine")  # vLLM numbers its engines; here there is one


def values(model: str) -> tuple[str, str]:
    return model, "0"


class EngineCollector(Collector):
    """Reads the engine at a scrape. Only one thread writes the counters, so no lock is needed."""

    def __init__(self, engine: Engine, model: str, prefix: str) -> None:
        self._engine = engine
        self._labels = values(model)
        self._prefix = prefix

    def describe(self) -> Iterable[Metric]:
        return ()  # then the registry does not scrape once to learn the names

    def collect(self) -> Iterator[Metric]:
        yield from self._requests(self._prefix)
        yield from self._cache(self._prefix)
        yield from self._blocks("kvarn")
        yield from self._tiers("kvarn")
        yield from self._kernels("kvarn")
        yield from self._sampling("kvarn")

    def _gauge(self, name: str, what: str, value: float, **labels: str) -> Metric:
        family = GaugeMetricFamily(name, what, labels=[*LABELS, *labels])
        family.add_metric([*self._labels, *labels.values()], value)
        return family

    def _counter(self, name: str, what: str, value: float) -> Metric:
        family = CounterMetricFamily(name, what, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _by(self, label: str, name: str, what: str, found: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, what, labels=[*LABELS, label])
        for key, value in found.items():
            family.add_metric([*self._labels, key], value)
        return family

    # -- vLLM's names --------------------------------------------------------------------------------------------

    def _requests(self, prefix: str) -> Iterator[Metric]:
        stats, scheduler = self._engine.stats, self._engine.scheduler
        running = {id(sample.request) for sample in list(scheduler.running)}
        waiting = {id(sample.request) for sample in list(scheduler.waiting)} - running
        prompt, cached = stats.prompt_tokens, stats.cached_tokens
        yield self._gauge(f"{prefix}:num_requests_running", "requests being computed", len(running))
        yield self._gauge(f"{prefix}:num_requests_waiting", "requests waiting for room", len(waiting))
        preemptions = scheduler.n_preemptions
        yield self._counter(f"{prefix}:num_preemptions", "samples preempted to make room for older ones", preemptions)
        yield self._counter(f"{prefix}:prompt_tokens", "prompt tokens of answered requests", prompt)
        yield self._counter(f"{prefix}:prompt_tokens_cached", "prompt tokens reused from the cache", cached)
        yield self._counter(f"{prefix}:generation_tokens", "tokens sampled", stats.generated_tokens)

    def _cache(self, prefix: str) -> Iterator[Metric]:
        cache = self._engine.cache
        usage, plan, config = cache.usage(), cache.plan, cache.plan.groups[0].config
        yield self._gauge(f"{prefix}:kv_cache_usage_perc", "blocks in use, 0 to 1", usage.blocks_used / usage.blocks)
        yield self._counter(f"{prefix}:prefix_cache_queries", "prompt tokens looked up", usage.prefix_queries)
        yield self._counter(f"{prefix}:prefix_cache_hits", "prompt tokens found", usage.prefix_hits)
        queries, hits = usage.external_queries, usage.external_hits
        yield self._counter(f"{prefix}:external_prefix_cache_queries", "prompt tokens looked up in tiers", queries)
        yield self._counter(f"{prefix}:external_prefix_cache_hits", "prompt tokens found in tiers", hits)
        yield self._gauge(
            f"{prefix}:cache_config_info",
            "settings of the cache, as labels; the value is 1",
            1,
            block_size=str(config.block_size),
            cache_dtype=plan.codec.name,
            enable_prefix_caching=str(cache.shares),
            num_gpu_blocks=str(usage.blocks),
            sliding_window=str(config.spec.window),
        )

    # -- our own -------------------------------------------------------------------------------------------------

    def _blocks(self, prefix: str) -> Iterator[Metric]:
        usage, plan = self._engine.cache.usage(), self._engine.cache.plan
        nbytes, kind = usage.nbytes, {"strategy": plan.strategy.name, "codec": plan.codec.name}
        yield self._gauge(f"{prefix}:kv_cache_bytes", "bytes of keys and values that are allocated", nbytes, **kind)
        yield self._gauge(f"{prefix}:kv_cache_blocks", "blocks that are allocated", usage.blocks)
        cached = usage.blocks_cached
        yield self._gauge(f"{prefix}:kv_cache_blocks_cached", "unreferenced blocks kept for reuse", cached)
        resident = usage.tokens_resident
        yield self._gauge(f"{prefix}:kv_cache_resident_tokens", "tokens in blocks, each counted once", resident)
        misses = {reason.value: float(n) for reason, n in usage.prefix_misses.items()}
        yield self._by("reason", f"{prefix}:kv_cache_misses", "prompts, by the reason why reuse ended", misses)
        yield self._counter(f"{prefix}:kv_cache_evictions", "cached blocks evicted", usage.blocks_evicted)

    def _tiers(self, prefix: str) -> Iterator[Metric]:
        counts = self._engine.tiers.counts()
        held = GaugeMetricFamily(f"{prefix}:kv_tier_bytes", "bytes in a tier", labels=[*LABELS, "tier"])
        for tier, count in counts.items():
            held.add_metric([*self._labels, tier], count.nbytes)
        yield held
        for name, what, found in (
            ("reads", "blocks read from a tier", {tier: float(c.reads) for tier, c in counts.items()}),
            ("writes", "blocks written to a tier", {tier: float(c.writes) for tier, c in counts.items()}),
            ("drops", "blocks that a tier lost", {tier: float(c.drops) for tier, c in counts.items()}),
        ):
            yield self._by("tier", f"{prefix}:kv_tier_{name}", what, found)

    def _kernels(self, prefix: str) -> Iterator[Metric]:
        counters = self._engine.memory.counters
        seconds, calls = dict(counters.seconds), {k: float(n) for k, n in dict(counters.calls).items()}
        yield self._by("kernel", f"{prefix}:attention_seconds", "time in attention, by kernel", seconds)
        yield self._by("kernel", f"{prefix}:attention_kernel_calls", "calls, by kernel", calls)
        yield self._counter(f"{prefix}:kv_cache_read_bytes", "bytes read from cells by attention", counters.read)
        yield self._counter(f"{prefix}:kv_cache_written_bytes", "bytes written to cells", counters.written)
        yield self._counter(f"{prefix}:kv_cache_copied_bytes", "bytes copied from cells to cells", counters.copied)

    def _sampling(self, prefix: str) -> Iterator[Metric]:
        stats = self._engine.stats
        sampled = {where: float(n) for where, n in dict(stats.sampled).items()}
        yield self._by("where", f"{prefix}:sampled_tokens", "tokens sampled: `device`, or why the host did", sampled)
        yield self._counter(
            f"{prefix}:steps_ahead", "steps launched before the last tokens were read", stats.steps_ahead
        )
