"""Attention through the real bookkeeping, layer by layer, with arrays of the host and an oracle in float64.

The cells are NaN at the start: a cell that is read before it was written shows in the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gpu.support.launching import FORMS, as_stored
from numpy.typing import NDArray

from kvarn.backends.cuda.backend import Cuda
from kvarn.backends.cuda.layers import CudaLayers
from kvarn.backends.cuda.memory import ROTATED
from kvarn.backends.reference import dense
from kvarn.backends.reference.codecs import DEFINITIONS
from kvarn.cache.cache import KVCache
from kvarn.cache.codec import TILE, codecs_of
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec

Floats = NDArray[np.float32]
Schedule = Sequence[dict[int, int]]  # per step: sequence -> new tokens
Key = tuple[int, int]  # sequence, layer


@dataclass(frozen=True)
class Inputs:
    """Queries, keys and values of one sequence in one layer, [T, heads, dim]."""

    q: Floats
    k: Floats
    v: Floats


def workload(layers: Sequence[LayerSpec], schedule: Schedule, seed: int = 0) -> dict[Key, Inputs]:
    lengths: dict[int, int] = {}
    for batch in schedule:
        for seq, n in batch.items():
            lengths[seq] = lengths.get(seq, 0) + n
    found = {}
    for seq, length in lengths.items():
        for layer, spec in enumerate(layers):
            random = np.random.default_rng([seed, seq, layer, spec.n_heads, spec.n_kv_heads, spec.k_dim])
            heads = (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)
            found[seq, layer] = Inputs(*(random.standard_normal((length, n, spec.k_dim), np.float32) for n in heads))
    return found


class Driven:
    """A cache on the device, driven layer by layer."""

    def __init__(self, backend: Cuda, config: CacheConfig) -> None:
        self.plan = plan(config, backend.default_layout)
        self.book = KVCache(self.plan)
        self.memory = backend.memory(self.plan)
        self.layers = CudaLayers(self.memory)
        self.memory.driver.fill(self.memory.arena.address, 0xFF, self.memory.arena.nbytes)
        self.done: dict[int, int] = {}

    def step(self, batch: dict[int, int], data: dict[Key, Inputs], attend: bool = True) -> dict[Key, Floats]:
        """New tokens of some sequences: the outputs of each layer, or nothing if they are only written."""
        for seq, n in batch.items():
            if seq not in self.done:
                self.book.open(seq, salt=str(seq).encode())
                self.done[seq] = 0
            if not self.book.reserve(seq, self.done[seq] + n):
                raise AssertionError(f"no room for sequence {seq}")
        step = self.book.prepare(list(batch))
        self.layers.apply(step)
        spans = [(seq, self.done[seq], self.done[seq] + batch[seq]) for seq in step.seqs]
        found: dict[Key, Floats] = {}
        read = self.layers.counters.read
        for layer in range(self.plan.n_layers):
            q, k, v = (
                np.concatenate([getattr(data[seq, layer], name)[a:b] for seq, a, b in spans])
                for name in ("q", "k", "v")
            )
            self.layers.write(layer, k, v)
            if attend:
                parts = np.split(self.layers.attend(layer, q), np.cumsum([b - a for _, a, b in spans])[:-1])
                found |= {(seq, layer): part for (seq, _, _), part in zip(spans, parts, strict=True)}
        if attend and self.layers.counters.read - read != self.plan.read_bytes(step):
            raise AssertionError("the counter of bytes read is not what the plan says")
        for seq, a, b in spans:
            self.book.advance(seq, b - a)
            self.book.commit(seq, range(a, b))
            self.done[seq] = b
        return found

    def run(self, schedule: Schedule, data: dict[Key, Inputs]) -> dict[Key, Floats]:
        parts: dict[Key, list[Floats]] = {}
        for batch in schedule:
            for key, part in self.step(batch, data).items():
                parts.setdefault(key, []).append(part)
        self.book.check()
        return {key: np.concatenate(each) for key, each in parts.items()}


def rows_to_check(length: int, spec: LayerSpec, most: int) -> list[int]:
    """Positions around the edges of tiles, splits, windows and pins, and others evenly."""
    edges = [edge + d for edge in (0, 16, 64, 128, 256, 512, spec.window or 0, spec.pinned, length) for d in (-1, 0, 1)]
    inside = [row for row in dict.fromkeys(edges) if 0 <= row < length]
    even = np.linspace(0, length - 1, max(most - len(inside), 2)).astype(int).tolist()
    return sorted({*inside[:most], *even, length - 1})


class Expected(NamedTuple):
    values: NDArray[np.float64]  # [rows, heads, dim]
    sizes: NDArray[np.float64]  # the same average over sizes: rounding moves an output by a part of it

    def error(self, found: Floats) -> float:
        """The largest one, relative to the sizes. It is infinite if an output is not finite."""
        assert (self.sizes > 0).all(), "errors are divided by them"
        if found.shape != self.values.shape or not np.isfinite(found).all():
            return float("inf")
        return float((np.abs(found - self.values) / self.sizes).max())


def in_cells(x: Floats, codec: str) -> NDArray[np.float64]:
    """What cells of a codec, or of a plain type, hold of keys or values [T, heads, dim]."""
    if codec in FORMS:
        return as_stored(x, codec)
    definition = DEFINITIONS[codec]
    rows = definition.decode(definition.define(np.ascontiguousarray(x.reshape(-1, x.shape[-1]))), x.shape[-1])
    return rows.reshape(x.shape).astype(np.float64)


def sizes_of(v: NDArray[np.float64], codec: str) -> NDArray[np.float64]:
    """What rounding is a part of. A number that was rotated is a sum of 32 others, so it can be near zero while they
    are not: its size is not less than the average over its block."""
    if codec in FORMS:
        return np.abs(v)
    blocks = np.split(np.abs(v), range(ROTATED, v.shape[-1], ROTATED), axis=-1)
    return np.concatenate([np.maximum(block, block.mean(-1, keepdims=True)) for block in blocks], -1)


def seen_at(row: int, cells: NDArray[np.float64], own: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """What the query at position `row` reads: its own tile is in int8, if there is a tail."""
    tile = row // TILE * TILE
    return cells[: row + 1] if own is None else np.concatenate([cells[:tile], own[tile : row + 1]])


class Oracle:
    """Dense attention over what the cells hold. Queries are rounded as plain cells are."""

    def __init__(self) -> None:
        self._known: dict[Any, Expected] = {}

    def rows(self, key: Any, x: Inputs, spec: LayerSpec, codec: str, rows: Sequence[int]) -> Expected:
        """The key names the inputs."""
        known = (key, spec, codec, tuple(rows))
        if known not in self._known:
            q = as_stored(x.q, codec) if codec in FORMS else x.q.astype(np.float64)
            pair, found = codecs_of(codec), []
            sides = ((x.k, pair.k), (x.v, pair.v))
            cells = [in_cells(each, side.name) for each, side in sides]
            own = [in_cells(each, "int8") if side.tail else None for each, side in sides]
            for r in rows:
                k, v = (seen_at(r, *each) for each in zip(cells, own, strict=True))
                both = np.concatenate([v, sizes_of(v, pair.v.name)], -1)
                found.append(dense.attend(q[r : r + 1], k, both, spec, spec.k_dim**-0.5, r))
            self._known[known] = Expected(*np.split(np.concatenate(found), 2, axis=-1))
        return self._known[known]


def same_bits(a: Floats, b: Floats) -> bool:
    return a.shape == b.shape and bool((np.ascontiguousarray(a).view(np.uint32) == b.view(np.uint32)).all())
