"""Memory of the device: what is free, caches beyond 2^31 numbers, what is refused, and that all is given back."""

import gc
from dataclasses import replace

import numpy as np
from gpu.support.driving import Driven, Oracle, workload

from kvarn.backends import check_memory
from kvarn.backends.cuda.memory import CudaMemory
from kvarn.cache.plan import CacheConfig, plan
from kvarn.errors import KvarnError, OutOfMemory
from proof.conformance import LIMITS, gqa
from proof.report import Check, Report
from proof.site import Site

SLACK = 64 << 20  # bytes that a driver may keep for itself


def run(site: Site, report: Report) -> None:
    before = site.backend.room() or 0
    with report.check("room") as check:
        total = site.backend.memory_bytes or 0
        check.case(0 < before < total, f"room for {before} of {total} bytes")
        check.number("free GiB", round(before / 2**30, 2))
        check.number("total GiB", round(total / 2**30, 2))
    for strategy in ("contiguous", "paged"):
        with report.check(f"far end of a cache, {strategy}") as check:
            _far_end(site, check, strategy)
    with report.check("refusals") as check:
        _refusals(site, check)
    with report.check("all is released") as check:
        gc.collect()
        after = site.backend.room() or 0
        check.case(after >= before - SLACK, f"{before - after} bytes are still in use")


def _far_end(site: Site, check: Check, strategy: str) -> None:
    """The last sequence of a cache whose layers have more than 2^31 numbers of K."""
    context, max_seqs, length = site.pick((1 << 17, 18, 4096), (1 << 17, 18, 1024), (64, 3, 60))
    spec = gqa(2, 2, 16) if site.interpreted else gqa(8, 8, 128)
    config = CacheConfig([spec, spec], context, strategy, "bf16", max_seqs=max_seqs, max_chunk=context)
    driven = Driven(site.backend, config)
    group, last = driven.plan.groups[0], max_seqs - 1
    for seq in range(last):  # they hold the blocks at the start
        driven.book.open(seq)
        check.case(driven.book.reserve(seq, context), f"no room for sequence {seq}")
    data = workload(config.layers, [{last: length}])
    driven.step({last: length - 4}, data, attend=False)
    found = driven.step({last: 3}, data), driven.step({last: 1}, data)
    first = min(block for block, _ in driven.book.placements[0].blocks(last)) * group.parts.k.strides.block
    check.number("first number of the sequence", first)
    check.case(site.interpreted or first > 2**31, "the sequence does not lie beyond 2^31 numbers")
    oracle = Oracle()
    for layer in (0, 1):
        x = data[last, layer]
        expected = oracle.rows((last, layer), x, spec, "bf16", range(length - 4, length))
        ours = np.concatenate([each[last, layer] for each in found])
        check.within("error", expected.error(ours), LIMITS["bf16"], f"layer {layer}")


def _refusals(site: Site, check: Check) -> None:
    spec, total = gqa(8, 8, 128), site.backend.memory_bytes or 0
    config = CacheConfig([spec], 1 << 17, "paged", "bf16", max_seqs=1)
    one = plan(config, "head-major").nbytes
    large = plan(replace(config, max_seqs=max(2 * total // one, 2)), "head-major")
    for what, refuse, words in (
        ("more than there is", lambda: check_memory(large, site.backend), "lower the context"),
        ("an allocation that fails", lambda: site.backend.memory(large), "" if site.interpreted else "MiB free"),
    ):
        try:
            refuse()
            check.case(False, f"{what}: not refused")
        except OutOfMemory as error:
            check.case("\n" not in str(error) and words in str(error), f"{what}: {error}")
    narrow = CacheConfig([gqa(1, 1, 8)], 1 << 20, "paged", "bf16", max_seqs=2048)
    try:
        CudaMemory(site.driver, plan(narrow, "head-major"))
        check.case(False, "2^31 cells were not refused")
    except KvarnError as error:
        check.case("2^31 cells" in str(error), f"2^31 cells: {error}")
    refused = CacheConfig([spec], 1024, "paged", "f16/int8")
    try:
        site.backend.memory(plan(refused, "head-major"))
        check.case(False, "cells of f16/int8 were not refused")
    except KvarnError as error:
        check.case("int8" in str(error), f"int8: {error}")
