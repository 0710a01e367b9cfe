"""Attention against dense attention in float64: strategies x cell types x specs x block sizes and layouts."""

import numpy as np
from gpu.support.driving import Driven, Inputs, Key, Oracle, Schedule, rows_to_check, workload

from kvarn.cache.plan import CacheConfig, Plan, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.strategy import STRATEGIES
from kvarn.errors import KvarnError
from proof.report import Check, Report
from proof.site import Site

LIMITS = {"f32": 2e-6, "f16": 6e-4, "bf16": 5e-3}  # of an error, relative to the average over absolute values
LAYOUTS = ("head-major", "token-major", "repeated")
WINDOWED = ("contiguous", "ring", "sliding", "sinks", "paged")


def gqa(n_heads: int, n_kv_heads: int, dim: int, window: int | None = None, pinned: int = 0) -> LayerSpec:
    return LayerSpec(n_heads, n_kv_heads, dim, dim, window, pinned)


SPECS: dict[str, list[LayerSpec]] = {
    "64, 1 of 1": [gqa(2, 2, 64)],
    "64, 3 of 1": [gqa(9, 3, 64)],
    "96, 4 of 1": [gqa(8, 2, 96)],
    "128, 8 of 1": [gqa(8, 1, 128)],
    "128, 20 of 1": [gqa(20, 1, 128)],
    "256, 4 of 1": [gqa(4, 1, 256)],
    "8, 2 of 1": [gqa(4, 2, 8)],
    "128, window": [gqa(8, 2, 128, window=300)],
    "64, narrow window": [gqa(4, 2, 64, window=17)],
    "64, pinned": [gqa(4, 2, 64, window=100, pinned=5)],
    "64, many pinned": [gqa(4, 2, 64, window=40, pinned=261)],
    "hybrid": [gqa(4, 1, 128, window=100), gqa(4, 1, 128), gqa(4, 1, 128, window=100)],
}
FULL: Schedule = [
    {0: 300},
    {0: 1, 1: 64},
    {0: 1, 1: 1, 2: 17},
    {0: 250, 1: 1, 2: 1},
    {0: 1, 1: 200},
    {0: 70, 1: 1, 2: 3},
]
QUICK: Schedule = [{0: 250}, {0: 1, 1: 20}, {0: 18, 1: 1}, {0: 1, 1: 3}]
TINY: Schedule = [{0: 40}, {0: 1, 1: 3}, {0: 2, 1: 1}]
CONTEXT = 640


def run(site: Site, report: Report) -> None:
    schedule = site.pick(FULL, QUICK, TINY)
    names = site.pick(list(SPECS), ["64, 3 of 1", "64, pinned", "hybrid"], ["64, 3 of 1", "64, pinned"], ["8, 2 of 1"])
    codecs = site.pick(("f32", "f16", "bf16"), ("f32", "f16", "bf16"), ("f32", "bf16"), ("bf16",))
    for name in names:
        layers = SPECS[name]
        data = workload(layers, schedule)
        for codec in codecs:
            with report.check(f"{codec}, heads of {name}") as check:
                _all_caches(site, check, layers, codec, schedule, data)


def configs(site: Site, layers: list[LayerSpec], codec: str, max_chunk: int) -> list[CacheConfig]:
    """Every strategy with blocks of every size, and every layout. What a plan refuses is left out."""
    window, pinned = (max((getattr(s, n) or 0 for s in layers), default=0) for n in ("window", "pinned"))
    same = all(spec == layers[0] for spec in layers)
    found = []
    for strategy in site.pick(tuple(STRATEGIES), ("paged", "sinks", "repeated"), ("paged", "sinks"), ("paged",)):
        blocks: tuple[int | None, ...] = site.pick((None, 16, 32, 64), (None, 16), (None,))
        for block in blocks:
            for layout in site.pick((None, *LAYOUTS), (None, *LAYOUTS), (None,)):
                config = CacheConfig(
                    layers=layers,
                    context=CONTEXT,
                    strategy=strategy,
                    codec=codec,
                    layout=layout,
                    block_size=block,
                    max_seqs=3,
                    max_chunk=max_chunk,
                    window=window or None if same else None,
                    pinned=pinned,
                )
                if _allowed(config):
                    found.append(config)
    return found


def _allowed(config: CacheConfig) -> bool:
    try:
        plan(config, "head-major")
    except KvarnError:
        return False
    return True


def _all_caches(
    site: Site, check: Check, layers: list[LayerSpec], codec: str, schedule: Schedule, data: dict[Key, Inputs]
) -> None:
    oracle = Oracle()
    for config in configs(site, layers, codec, max(max(batch.values()) for batch in schedule)):
        driven = Driven(site.backend, config)
        found = driven.run(schedule, data)
        what = f"{config.strategy} {driven.plan.layout.name} {config.block_size}"
        for key, x in data.items():
            spec = _effective(driven.plan, key[1])
            rows = rows_to_check(len(x.q), spec, site.pick(40, 20, 6))
            expected = oracle.rows(key, x, spec, codec, rows)
            check.case(bool(np.isfinite(found[key]).all()), f"{what}, {key}: an output is not finite")
            error = expected.error(found[key][rows])
            check.within("error", error, LIMITS[codec], f"{what}, sequence {key[0]}, layer {key[1]}")


def _effective(planned: Plan, layer: int) -> LayerSpec:
    return planned.groups[planned.group_of(layer)].config.spec
