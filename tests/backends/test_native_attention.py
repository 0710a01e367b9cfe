"""Attention of the native backend: every head size and group, every instruction set, bit for bit.

That each combination of the cache's axes is right is test_conformance; here are the shapes that kernels know.
"""

import fuzz_attention
import numpy as np
import pytest
from support.axes import SPECS, config_of
from support.harness import (
    BACKENDS,
    F32_MATH,
    MIX,
    Driven,
    Inputs,
    assert_near,
    backend,
    bits,
    chunks,
    drive,
    expect,
    fill_with_nan,
    inputs,
    moved,
    pool,
    using,
)
from support.replay import memory_of, record, replay_on

from kvarn import native
from kvarn.backends.cpu import Cpu
from kvarn.cache.codec import CODECS
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec
from kvarn.cache.strategy import STRATEGIES
from kvarn.errors import KvarnError

ISAS = native.isas()
EDGES = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
LONG_EDGES = (*EDGES, 511, 512, 513, 2047, 2048, 2049)


def up_to_edges(edges: tuple[int, ...]) -> list[int]:
    """Sizes of chunks after which every edge is reached by a single token."""
    sizes, at = [], 0
    for edge in edges:
        sizes += [edge - 1 - at, 1]
        at = edge
    return [size for size in sizes if size]


def attend(spec: LayerSpec, codec: str, x: Inputs, sizes: list[int], threads: int = 2, **more) -> np.ndarray:
    settings = dict(strategy="paged", block_size=32) | more
    config = CacheConfig([spec], context=len(x.q), codec=codec, max_chunk=max(sizes), **settings)
    cache = Driven(config, Cpu(pool(threads)))
    fill_with_nan(cache)
    return drive(cache, chunks(0, *sizes), {(0, 0): x})[0, 0]


def agree(spec: LayerSpec, codec: str, edges: tuple[int, ...], portable: tuple[int, ...] | None = None) -> None:
    """Prefill and decode, near the oracle where a tile ends, and the same bits from every instruction set. The portable
    kernels are slow: they may be given fewer edges."""
    length = edges[-1]
    x = inputs(spec, length, seed=length)
    for order in native.SUM_ORDERS[:1] if codec in F32_MATH else native.SUM_ORDERS:
        with using(ISAS[0], order):
            whole = attend(spec, codec, x, [length])
            for edge in edges:
                seen = Inputs(x.q[:edge], x.k[:edge], x.v[:edge])
                assert_near(whole[edge - 1 : edge], expect(seen, spec, codec, first=edge - 1), edge)
        for name in ISAS:
            reached = portable if name == "portable" and portable else edges
            n = reached[-1]
            with using(name, order):
                again = attend(spec, codec, Inputs(x.q[:n], x.k[:n], x.v[:n]), up_to_edges(reached))
                assert (bits(again) == bits(whole[:n])).all(), (name, order)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dim", [48, 64, 80, 96, 128, 256, 1, 5, 24, 40])
def test_head_dims(dim: int, codec: str) -> None:
    agree(LayerSpec(6, 2, dim, dim), codec, EDGES, portable=EDGES if dim in (5, 64) else (1, 33, 65))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("group", range(1, 17))
def test_groups(group: int, codec: str) -> None:
    agree(LayerSpec(2 * group, 2, 32, 32), codec, (1, 33, 65))


@pytest.mark.parametrize("codec", CODECS)
def test_long(codec: str) -> None:
    agree(LayerSpec(3, 1, 64, 64), codec, LONG_EDGES, portable=EDGES)


@pytest.mark.parametrize("codec", CODECS)
def test_a_window_and_pinned_tokens_far_along(codec: str) -> None:
    agree(LayerSpec(4, 1, 16, 16, window=300, pinned=40), codec, (*EDGES, 511, 512, 513, 1025))


@pytest.mark.parametrize("codec", CODECS)
def test_threads_layouts_and_block_sizes_do_not_change_a_bit(codec: str) -> None:
    spec = LayerSpec(9, 3, 64, 64)
    x = inputs(spec, 530, seed=1)
    sizes = up_to_edges((1, 256, 257, 512, 530))
    for order in native.SUM_ORDERS:
        with using(ISAS[0], order):
            smallest = CODECS[codec].tail or 16
            expected = attend(spec, codec, x, [530], threads=1, layout="token-major", block_size=smallest)
            for threads in (1, 2, 3, 5):
                for layout in ("head-major", "panel", "columns", "repeated"):
                    for block_size in (32, 64):
                        ours = attend(spec, codec, x, sizes, threads, layout=layout, block_size=block_size)
                        assert (bits(ours) == bits(expected)).all(), (order, threads, layout, block_size)


def summed(v: np.ndarray, order: str) -> np.ndarray:
    """Rows of v added up in f32, in this order of terms (native/isa.hpp)."""
    total = np.zeros(v.shape[1], np.float32)
    if order == "pairs":
        for i in range(0, len(v), 2):
            total = (total + v[i + 1]) + v[i]
        return total
    for i in range(0, len(v), 32):
        even, odd = (np.add.accumulate(v[i + parity : i + 32 : 2])[-1] for parity in (0, 1))
        total += even + odd
    return total


@pytest.mark.parametrize("order", native.SUM_ORDERS)
def test_sums_are_in_the_order_that_is_named(order: str) -> None:
    """Keys of zeros weigh all values alike, with 1: what comes out is their sum, over their number."""
    spec, n = LayerSpec(4, 2, 64, 64), 256
    x = inputs(spec, n, seed=9)
    x.k[:] = 0
    v = (x.v.view(np.uint32) & 0xFFFF0000).view(np.float32)  # bf16 numbers, of many sizes, so that sums are rounded
    v *= np.exp2(np.random.default_rng(1).integers(-12, 13, v.shape)).astype(np.float32)
    x = Inputs(x.q, x.k, v)
    expected = np.stack([summed(v[:, head], order) / np.float32(n) for head in (0, 0, 1, 1)])
    for name in ISAS:
        for sizes in ([n], [n - 1, 1]):
            with using(name, order):
                found = attend(spec, "bf16", x, sizes)[-1]
            assert (bits(found) == bits(expected)).all(), (name, sizes)
    other = np.stack([summed(v[:, head], next(o for o in native.SUM_ORDERS if o != order)) for head in (0, 1)])
    assert (other / np.float32(n) != expected[::2]).any(), "the orders can be told apart"


def test_an_order_that_is_not_there() -> None:
    before = native.sum_order()
    with pytest.raises(KvarnError, match="pairs or tiles"):
        native.select_sum_order("triples")
    assert native.sum_order() == before


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_counters_are_those_of_the_reference(strategy: str, codec: str) -> None:
    for spec in (SPECS["gqa"], SPECS["window"], SPECS["pinned past a block"]):
        recording = record(config_of(spec, strategy, None, None), MIX["mixed"][:4])
        found = []
        for name in BACKENDS:
            with using(name):
                memory = memory_of(recording, backend(), "head-major" if strategy != "repeated" else None, codec)
                replay_on(memory, recording)
                found.append(moved(memory.counters))
        assert all(counters == found[0] for counters in found[1:]), spec


@pytest.mark.parametrize("seed", range(1, 13))
def test_random_cases(seed: int) -> None:
    """A few of `make fuzz-attention`."""
    fuzz_attention.check(fuzz_attention.make(seed, most=130), seed)
