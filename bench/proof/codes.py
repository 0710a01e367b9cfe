"""Cells that are codes: what they hold, attention over them, and equal bits, for codecs alone and in pairs.

The other sections use plain cells. Here the bytes of cells are those of the reference backend, and the tiles that
are filled in a step are filled by runs, by single tokens and by both.
"""

from typing import Any

import numpy as np
from gpu.support.driving import Driven, Inputs, Key, Oracle, Schedule, rows_to_check, same_bits, workload
from gpu.support.models import Loaded

from kvarn.backends.reference import Reference
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec
from proof.bits import batches, caches, chunks_and_caches
from proof.conformance import CONTEXT, QUICK, TINY, configs, gqa
from proof.models import write
from proof.report import Check, Report
from proof.requests import under_pressure
from proof.site import Site

LIMIT = 1.2e-2  # of an error, relative to the average over absolute values: queries and probabilities are bf16
ALONE = ("int8", "int6", "int4")
PAIRS = ("int8/int4", "bf16/int8", "int8/bf16", "bf16/int4", "int6/int4", "int4/bf16")
LAYERS = {
    "64, 3 of 1": [gqa(9, 3, 64)],
    "96, pinned": [gqa(4, 2, 96, window=100, pinned=5)],
    "128, 8 of 1": [gqa(8, 1, 128)],
    "128, window": [gqa(4, 1, 128, window=70)],
    "256, 4 of 1": [gqa(4, 1, 256)],
    "40, 2 of 1": [gqa(4, 2, 40)],
}
FULL: Schedule = [{0: 300}, {0: 1, 1: 64}, {0: 19, 1: 1, 2: 31}, *[{0: 1, 1: 1, 2: 1}] * 3, {0: 100, 1: 200, 2: 3}]


def run(site: Site, report: Report) -> None:
    codecs = site.pick((*ALONE, *PAIRS), (*ALONE, *PAIRS), ("int8", "int8/int4"), ("int8/int4",))
    names = site.pick(list(LAYERS), list(LAYERS), ["40, 2 of 1"])
    schedule = site.pick(FULL, QUICK, TINY)
    for codec in codecs:
        with report.check(f"{codec}: cells and attention") as check:
            for name in names:
                _conform(site, check, LAYERS[name], codec, schedule)
        with report.check(f"{codec}: bits of attention") as check:
            for name in names:
                _bits(site, check, LAYERS[name][0], codec)
    if site.size == "smallest":
        return
    loaded = Loaded(write(site, "llama", "BF16"), site.backend)
    for codec in site.pick(codecs, ("int8", "int8/int4", "int4"), ("int8/int4",)):
        with report.check(f"llama BF16, {codec}: chunks, caches") as check:
            chunks_and_caches(site, check, loaded, codec)
        with report.check(f"llama BF16, {codec}: batches") as check:
            batches(site, check, loaded, codec)
        with report.check(f"llama BF16, {codec}: engine") as check:
            under_pressure(site, check, loaded, codec)


def _conform(site: Site, check: Check, layers: list[LayerSpec], codec: str, schedule: Schedule) -> None:
    data, oracle = workload(layers, schedule), Oracle()
    chosen = configs(site, layers, codec, max(max(batch.values()) for batch in schedule))
    for config in site.pick(chosen, chosen[::3], chosen[:1]):
        driven = Driven(site.backend, config)
        found = driven.run(schedule, data)
        what = f"{config.strategy} {driven.plan.layout.name} {config.block_size}, heads of {layers[0].k_dim}"
        for key, x in data.items():
            spec = driven.plan.groups[driven.plan.group_of(key[1])].config.spec
            rows = rows_to_check(len(x.q), spec, site.pick(40, 20, 6))
            error = oracle.rows(key, x, spec, codec, rows).error(found[key][rows])
            check.within("error", error, LIMIT, f"{what}, sequence {key[0]}")
    _same_cells(check, driven, config, schedule, data)


def _same_cells(check: Check, driven: Driven, config: CacheConfig, schedule: Schedule, data: dict[Key, Inputs]) -> None:
    """Every block has the bytes of the reference, which gets the same keys and values."""
    host, book, done = Reference().layers(driven.plan), KVCache(driven.plan), dict.fromkeys(driven.done, 0)
    host.arena[...] = 0xFF
    for batch in schedule:
        for seq, n in batch.items():
            if not done[seq]:
                book.open(seq, salt=str(seq).encode())
            book.reserve(seq, done[seq] + n)
        step = book.prepare(list(batch))
        host.apply(step)
        spans = [(data[seq, 0], done[seq], done[seq] + batch[seq]) for seq in step.seqs]
        host.write(0, *(np.concatenate([getattr(x, name)[a:b] for x, a, b in spans]) for name in ("k", "v")))
        for seq, n in batch.items():
            book.advance(seq, n)
            book.commit(seq, range(done[seq], done[seq] + n))
            done[seq] += n
    for block in range(driven.plan.groups[0].config.n_blocks):
        same = driven.memory.read_block(0, block) == host.read_block(0, block)
        check.case(same, f"{config.strategy} {config.codec}: block {block} has other bytes than the reference")


def _bits(site: Site, check: Check, spec: LayerSpec, codec: str) -> None:
    """The same rows by chunks, and in every cache."""
    length = site.pick(600, 300, 70, 40)
    data, expected = workload([spec], [{0: length}]), None
    for chunk in site.pick((length, 1, 7, 32, 100), (length, 7, 50), (length, 33)):
        sizes = [chunk] * (length // chunk) + ([length % chunk] if length % chunk else [])
        sizes = sizes[:-2] + [1] * sum(sizes[-2:]) if chunk == 50 else sizes  # single tokens at the end
        chosen = [each for each in caches(site, chunk == length, codec) if "pinned" not in each]
        for cache in chosen:
            given: dict[str, Any] = dict(
                context=CONTEXT, codec=codec, max_chunk=length, window=spec.window, pinned=spec.pinned
            )
            found = Driven(site.backend, CacheConfig([spec], **(given | cache))).run([{0: n} for n in sizes], data)
            expected = found[0, 0] if expected is None else expected
            what = f"heads of {spec.k_dim}, window {spec.window}, chunks of {chunk}, {cache}"
            check.case(same_bits(found[0, 0], expected), what)
