"""Runs random attention through the real cache on a schedule, and says what dense attention would give.

Storage is filled with NaN first: a cell that is read before it was written shows in the output. A test that asks for
the fixture `backend` runs once on the reference and once per instruction set of the native backend; one that asks for
`reference` runs on that alone. `backend()` gives the one whose turn it is, and raises where neither was asked for.
"""

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvarn import native
from kvarn.backends import BACKENDS as TABLE
from kvarn.backends import open_backend, reference
from kvarn.backends.base import Counters, Memory, Program
from kvarn.backends.cpu import Cpu, program
from kvarn.backends.cpu.memory import CpuMemory
from kvarn.backends.cpu.program import CpuProgram
from kvarn.backends.host import HostMemory, Store
from kvarn.backends.reference import Reference, dense, rope
from kvarn.backends.reference.cells import write
from kvarn.backends.reference.codecs import DEFINITIONS, PACKED, rotate, scale_of
from kvarn.cache.cache import KVCache
from kvarn.cache.codec import TILE, Codec, codecs_of
from kvarn.cache.placement import Placement
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.step import Step
from kvarn.engine import scoring
from kvarn.graph.ops import Rope
from kvarn.loading.checkpoint import Checkpoint
from kvarn.models.families import graph_of


class LacksInstructions(pytest.skip.Exception):
    """A test that this processor cannot run. The one kind of skip that is no failure when test material is present."""


Schedule = Sequence[dict[int, int]]  # per step: sequence -> new tokens
RUNNABLE = tuple(name for name in TABLE if name != "cuda")  # those that need no device
BACKENDS = ("reference", *native.isas())  # the native one by instruction set
two_backends = pytest.mark.parametrize("backend", BACKENDS[:2], indirect=True)
"""The reference and the best instruction set: for what the others cannot change, as test_kernels.py shows."""
MIX = {  # name: per step, sequence -> new tokens
    "mixed": [{0: 33}, {0: 1, 1: 48}, {1: 48, 2: 1, 0: 1}, {0: 30, 1: 1, 2: 47}, {0: 48, 1: 1, 2: 1}, {0: 47, 1: 48}],
    "alone": [{0: 48}, {0: 48}, {0: 48}, {0: 16}],
    "by ones": [{0: 1}] * 70,
    "odd": [{0: 7}, {0: 1}] * 18,
}
F32_MATH = ("f32", "f16")  # codecs whose cells the native backend multiplies in f32
INTEGERS = ("int8", *PACKED)  # and as integers; bf16 as bf16
LOG2E = np.float32(1.4426950408889634)
_current: list[str] = []  # the innermost `using` is the last


@cache
def pool(threads: int = 2) -> native.Pool:
    return native.Pool(threads)


@contextmanager
def using(name: str, order: str | None = None) -> Iterator[None]:
    """The backend of this name, and this order of sums, until the end of the block."""
    before = native.isa(), native.sum_order()
    _current.append(name)
    if name in native.isas():
        native.select_isa(name)
    native.select_sum_order(order or before[1])
    try:
        yield
    finally:
        _current.pop()
        native.select_isa(before[0])
        native.select_sum_order(before[1])


def current() -> str:
    """The backend whose turn it is. A test that asks for none must not run on the reference by accident."""
    if not _current:
        raise RuntimeError("no backend was chosen: use the fixture `backend` (each in turn) or `reference`, or `using`")
    return _current[-1]


def backend() -> Any:
    """The backend whose turn it is, with the attribute `kernels`; its `layers` returns a HostMemory."""
    return Cpu(pool()) if on_cpu() else open_backend(current(), 1)


def on_cpu() -> bool:
    return current() in native.isas()


class Driven:
    """A cache's book and its memory on a backend, driven together: a prepared step is applied at once, and a commit
    advances first. All other verbs are the book's."""

    def __init__(self, config: CacheConfig, place: Reference | Cpu, allocate=None) -> None:
        planned = plan(config, place.default_layout)
        self.book = KVCache(planned)
        self.backend = place
        self.host = place.layers(planned) if allocate is None else HostMemory(planned, place.kernels, allocate)
        self.memory: Memory = CpuMemory(self.host) if isinstance(place, Cpu) else self.host
        self._applying = threading.Lock()
        self.stores, self.tables, self.arena = self.host.stores, self.host.tables, self.host.arena
        self.write, self.attend, self.spec = self.host.write, self.host.attend, self.host.spec

    def __getattr__(self, verb: str):
        return getattr(self.book, verb)

    @property
    def counters(self) -> Counters:
        return self.memory.counters

    def prepare(self, seqs: Sequence[int]) -> Step:
        with self._applying:  # steps are applied in the order in which they were prepared
            step = self.book.prepare(seqs)
            self.memory.apply(step)
            self._check_tables(step)
        return step

    def _check_tables(self, step: Step) -> None:
        """After a step, its rows of every table hold all blocks of their sequences."""
        for placement, table in zip(self.book.placements, self.tables, strict=True):
            for seq, row in zip(step.seqs, step.rows, strict=True):
                blocks = placement.blocks(seq)
                assert table.blocks[row, : len(blocks)].tolist() == [block for block, _ in blocks], "a stale row"
                assert table.first[row, : len(blocks)].tolist() == [first for _, first in blocks], "a stale row"

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        self.book.advance(seq, len(tokens))
        self.book.commit(seq, tokens)


def named(placement: Placement, seq: int, tokens: Sequence[int]) -> None:
    """A step's tokens were written, and are known."""
    placement.advance(seq, len(tokens))
    placement.commit(seq, tokens)


def load_program(checkpoint: Checkpoint, threads: native.Pool) -> CpuProgram:
    return program.load_program(checkpoint, graph_of(checkpoint.config, checkpoint.shapes), threads)


def load_weights(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return reference.load_weights(checkpoint, graph_of(checkpoint.config, checkpoint.shapes))


def score(program: Program, cache: Driven, tokens: Sequence[int], first: int, chunk: int) -> np.ndarray:
    return scoring.score(program, cache.memory, cache.book, tokens, first, chunk)


def history(store: Store, block: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V of one block's first `length` slots, [length, head, dim], as views: nothing is copied."""
    return store.k[block, 0, :, :length].swapaxes(0, 1), store.v[block, 0, :, :length].swapaxes(0, 1)


def write_rotated(k: np.ndarray, v: np.ndarray, rotary: Rope, cache: Driven) -> None:
    """Keys rotated at the positions of the step, then written."""
    write(rope.apply(k, cache.host.positions, rotary), v, cache.stores[0], cache.tables[0])


@dataclass(frozen=True)
class Inputs:
    """Queries, keys and values of one sequence in one layer."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def inputs(spec: LayerSpec, length: int, seed: int, scale: float = 1.0) -> Inputs:
    rng = np.random.default_rng([seed, spec.n_heads, spec.n_kv_heads, spec.k_dim])
    q, k, v = (
        (scale * rng.standard_normal((length, heads, dim))).astype(np.float32)
        for heads, dim in ((spec.n_heads, spec.k_dim), (spec.n_kv_heads, spec.k_dim), (spec.n_kv_heads, spec.v_dim))
    )
    return Inputs(q, k, v)


def fill_with_nan(cache: Driven) -> None:
    cells_of_nan(cache.stores)


def cells_of_nan(stores: Sequence[Store]) -> None:
    """All bits are 1: a NaN in every type of float, and in the scales of integers."""
    for store in stores:
        tails = [] if store.tail is None else [store.tail.k, store.tail.v, store.tail.k_scale, store.tail.v_scale]
        for array in (*store.arrays, *(each for each in tails if each is not None)):
            unsigned = np.dtype(f"u{array.itemsize}")
            array.view(unsigned)[...] = np.iinfo(unsigned).max


def drive(cache: Driven, schedule: Schedule, data: dict[tuple[int, int], Inputs]) -> dict[tuple[int, int], np.ndarray]:
    """data[(sequence, layer)] -> output[(sequence, layer)], [T, n_heads, dim]. Tokens are the positions."""
    done: dict[int, int] = {}
    output = {key: np.full((*x.q.shape[:2], x.v.shape[-1]), np.nan, np.float32) for key, x in data.items()}
    for batch in schedule:
        for seq, n in batch.items():
            if seq not in done:
                cache.open(seq, salt=str(seq).encode())
                done[seq] = 0
            assert cache.reserve(seq, done[seq] + n)
        step = cache.prepare(list(batch))
        read = cache.counters.read
        spans = [(seq, done[seq], done[seq] + batch[seq]) for seq in step.seqs]
        for layer in range(len(cache.stores)):
            rows = [(data[seq, layer], a, b) for seq, a, b in spans]
            q, k, v = (np.concatenate([getattr(x, name)[a:b] for x, a, b in rows]) for name in ("q", "k", "v"))
            cache.write(layer, k, v)
            result = cache.attend(layer, q)
            at = 0
            for seq, a, b in spans:
                output[seq, layer][a:b] = result[at : at + b - a]
                at += b - a
        assert cache.counters.read - read == cache.plan.read_bytes(step), "kernels read what the step says, and no more"
        for seq, a, b in spans:
            cache.commit(seq, range(a, b))
            done[seq] = b
        cache.check()
    return output


def last_rows(cache: Driven, x: Inputs, new: int) -> np.ndarray:
    """Output of a sequence's last `new` tokens in one step. Those before are written, and nobody attends for them."""
    start, end = len(x.q) - new, len(x.q)
    cache.open(0)
    for first, last in ((0, start), (start, end)):
        if first < last:
            assert cache.reserve(0, last)
            cache.prepare([0])
            cache.write(0, x.k[first:last], x.v[first:last])
            output = cache.attend(0, x.q[start:end]) if last == end else None
            cache.commit(0, range(first, last))
            cache.check()
    return output


def run(config: CacheConfig, schedule: Schedule, seed: int = 0) -> tuple[dict[tuple[int, int], np.ndarray], Driven]:
    cache = Driven(config, backend())
    fill_with_nan(cache)
    return drive(cache, schedule, workload(config, schedule, seed)), cache


def workload(config: CacheConfig, schedule: Schedule, seed: int = 0) -> dict[tuple[int, int], Inputs]:
    lengths: dict[int, int] = {}
    for batch in schedule:
        for seq, n in batch.items():
            lengths[seq] = lengths.get(seq, 0) + n
    return {
        (seq, layer): inputs(spec, length, seed=1000 * seed + 10 * seq + layer)
        for seq, length in lengths.items()
        for layer, spec in enumerate(config.layers)
    }


def decoded(x: np.ndarray, codec: str) -> np.ndarray:
    """What the cells hold, as float64, by the codec's definition."""
    flat = np.ascontiguousarray(x.reshape(-1, x.shape[-1]))
    return DEFINITIONS[codec].decode(DEFINITIONS[codec].define(flat), x.shape[-1]).astype(np.float64).reshape(x.shape)


@dataclass(frozen=True)
class Stored:
    """What queries read of one sequence's K or V: `own` in their tile of 32 positions, `far` elsewhere. Without a tail
    they are the same."""

    far: np.ndarray
    own: np.ndarray

    def at(self, tile: int) -> np.ndarray:
        """For queries in this tile."""
        here = np.arange(len(self.far)) // TILE == tile
        return np.where(here.reshape(-1, *[1] * (self.far.ndim - 1)), self.own, self.far)


def stored(x: np.ndarray, codec: Codec) -> Stored:
    far = decoded(x, codec.name)
    return Stored(far, decoded(x, "int8") if codec.tail else far)


def spans(codec: str, first: int, end: int) -> list[tuple[int, int]]:
    """The positions from `first` to `end`, by tiles if queries read their own tile from a tail."""
    if not codecs_of(codec).tail:
        return [(first, end)]
    edges = [first, *range(first // TILE * TILE + TILE, end, TILE), end]
    return list(itertools.pairwise(edges))


def oracle(x: Inputs, spec: LayerSpec, codec: str) -> np.ndarray:
    pair = codecs_of(codec)
    k, v = stored(x.k, pair.k), stored(x.v, pair.v)
    return np.concatenate(
        [
            dense.attend(x.q[a:b], k.at(a // TILE), v.at(a // TILE), spec, spec.k_dim**-0.5, a)
            for a, b in spans(codec, 0, len(x.q))
        ]
    )


class Expected(NamedTuple):
    values: np.ndarray
    bound: np.ndarray | float  # by which the codec's arithmetic may move each of them, float32's rounding aside


def expect(x: Inputs, spec: LayerSpec, codec: str, first: int = 0) -> Expected:
    """The oracle's rows from position `first` on. Native products of bf16 round scaled queries and probabilities: the
    first is repeated here, the second moves an output by at most 2^-8 of the same average over absolute values."""
    pair = codecs_of(codec)
    k, v, q, scale = stored(x.k, pair.k), stored(x.v, pair.v), x.q, spec.k_dim**-0.5
    if on_cpu() and pair.k.name in INTEGERS:
        q, k, scale = (
            _rounded_queries(q, np.float32(scale) * LOG2E),
            stored(_whole_blocks(x.k), pair.k),
            float(np.log(2)),
        )
    elif on_cpu() and pair.k.name not in F32_MATH:
        q, scale = decoded(q * (np.float32(scale) * LOG2E), "bf16"), float(np.log(2))
    weighed = _weighed(x.v, pair.v) if on_cpu() and pair.v.name in INTEGERS else None
    found = []
    for a, b in spans(codec, first, len(q)):
        rows, keys, values = q[a:b], k.at(a // TILE), v.at(a // TILE)
        if not on_cpu() or pair.v.name in F32_MATH:
            found.append(Expected(dense.attend(rows, keys, values, spec, scale, a), np.zeros(1)))
        elif weighed is not None:
            bound = _integer_bound(rows, keys, [each.at(a // TILE) for each in weighed], spec, scale, a)
            found.append(Expected(dense.attend(rows, keys, values, spec, scale, a), bound[..., : v.far.shape[-1]]))
        else:
            both = np.concatenate([values, np.abs(values)], axis=-1)
            plain, average = np.split(dense.attend(rows, keys, both, spec, scale, a), 2, axis=-1)
            found.append(Expected(plain, 1.01 * 2.0**-8 * average))
    bounds = [np.broadcast_to(each.bound, each.values.shape) for each in found]
    return Expected(np.concatenate([each.values for each in found]), np.concatenate(bounds))


def _rounded_queries(q: np.ndarray, factor: np.float32) -> np.ndarray:
    """Queries as native kernels multiply them with integer keys: rotated, scaled, in 8 bits; then rotated back, in
    whole blocks of 32 numbers."""
    t = rotate(_whole_blocks(q)) * (factor * np.float32(1 / 32))
    steps = (np.abs(t).max(-1, keepdims=True) / np.float32(127)).astype(np.float32)
    codes = np.rint(np.divide(t, steps, out=np.zeros_like(t), where=steps > 0))
    return rotate(codes.astype(np.float64) * steps)


def _whole_blocks(x: np.ndarray) -> np.ndarray:
    """With the numbers that pad rows: rounding makes them differ from 0."""
    return np.pad(x, ((0, 0), (0, 0), (0, -x.shape[-1] % 32)))


def _weighed(x: np.ndarray, codec: Codec) -> tuple[Stored, Stored]:
    """[n, KV, blocks of 32 numbers]: the factor of a block's integers, and the sum of their absolute values."""
    n, heads, dim = x.shape
    flat = np.ascontiguousarray(x.reshape(n * heads, dim))
    eight = DEFINITIONS["int8"].define(flat)
    sums = np.abs(eight.cells.view(np.int8).astype(np.float64)).reshape(n, heads, -1, 32).sum(-1)
    factors = np.broadcast_to(eight.scales.reshape(n, heads, 1), sums.shape)
    if not codec.tail:
        return Stored(factors, factors), Stored(sums, sums)
    packed = PACKED[codec.name].pack(eight)
    levels = np.abs(PACKED[codec.name].levels(packed.cells).astype(np.float64)).sum(-1).reshape(n, heads, -1)
    return Stored(scale_of(packed.scales).reshape(n, heads, -1) / 2, factors), Stored(levels, sums)


def _integer_bound(
    q: np.ndarray, k: np.ndarray, weighed: Sequence[np.ndarray], spec: LayerSpec, scale: float, first: int
) -> np.ndarray:
    """Weights p * factor(V) are rounded to 1/255 of the largest of their tile. So each cell of the tile moves a rotated
    output by at most half a step times its integer, and an output by the mean of that over its block."""
    factors, sums = weighed
    n, heads, _ = sums.shape
    p = dense.attend(q, k, np.broadcast_to(np.eye(n)[:, None], (n, heads, n)), spec, scale, first)  # [T, H, n]
    moved = np.zeros((*p.shape[:2], sums.shape[-1]))
    for tile in range(0, n, TILE):
        slots = slice(tile, tile + TILE)
        for head in range(p.shape[1]):
            kv = head // spec.group
            weights = p[:, head, slots, None] * factors[slots, kv]
            moved[:, head] += weights.max(1) / 510 * sums[slots, kv].sum(0)
    return np.repeat(1.05 * moved / 32, 32, axis=-1)


_known: dict[tuple, Expected] = {}


def expect_once(key: object, x: Inputs, spec: LayerSpec, codec: str) -> Expected:
    """`expect`, remembered: the key names the inputs of this spec. The oracle is slow, and other backends ask again."""
    known = (key, spec, codec, len(x.q), on_cpu() and codec not in ("f32", "f16"))
    if known not in _known:
        _known[known] = expect(x, spec, codec)
    return _known[known]


def assert_near(output: np.ndarray, expected: Expected, *where: object) -> None:
    assert np.isfinite(output).all(), where
    excess = (np.abs(output - expected.values) - expected.bound).max()
    assert excess < 3e-6 * max(1.0, np.abs(expected.values).max()), (*where, excess)


def moved(counters: Counters) -> tuple[int, int, int, dict[str, int]]:
    """What must not differ between backends: all but time."""
    return counters.written, counters.read, counters.copied, dict(counters.calls)


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32)


def chunks(seq: int, *sizes: int) -> list[dict[int, int]]:
    return [{seq: size} for size in sizes]
