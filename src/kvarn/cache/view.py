"""The view: all that a kernel may know about the cache.

Store   one per layer: where the cells lie. Arrays are strided views of the arena; never copied, never reshaped.
Table   one per group of layers: which blocks each sequence has and where this step's tokens go. Its rows are
        persistent; a step rewrites only the cells that changed, so it costs the same at any context length.

A kernel takes Store, Table, LayerSpec and the scale, and nothing else. Tables are read-only while kernels run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarn.cache.codec import Codec, Floats
from kvarn.cache.counters import Counters
from kvarn.cache.placement import Residency
from kvarn.errors import BadArray


@dataclass(frozen=True, slots=True)
class Store:
    k: NDArray[Any]  # [block, panel, head, slot, dim], strided
    v: NDArray[Any]
    k_scale: Floats | None  # [block, panel, head, slot], strided
    v_scale: Floats | None
    codec: Codec
    counters: Counters

    @property
    def panel_size(self) -> int:
        return int(self.k.shape[3])

    @property
    def block_size(self) -> int:
        return int(self.k.shape[1] * self.k.shape[3])

    @property
    def n_heads(self) -> int:
        """Stored heads: KV heads, or query heads where they are repeated."""
        return int(self.k.shape[2])

    def history(self, block: int, length: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of one block's first `length` slots, [length, head, dim], as views: nothing is copied."""
        if not 0 <= block < len(self.k) or not 0 <= length <= self.panel_size:
            raise BadArray(
                f"block {block}, {length} slots: there are {len(self.k)} blocks, and a panel holds {self.panel_size}"
            )
        return self.k[block, 0, :, :length].swapaxes(0, 1), self.v[block, 0, :, :length].swapaxes(0, 1)

    @classmethod
    def over_pages(cls, k: NDArray[Any], v: NDArray[Any], codec: Codec, counters: Counters, layer: int = 0) -> "Store":
        """A store over somebody else's pages, in place: [page, layer, slot, head, dim] or [page, slot, head, dim]."""
        if codec.scaled:
            raise BadArray(f"pages carry no scales, which {codec.name} cells need: use f32, f16 or bf16 pages")
        if k.shape != v.shape or k.dtype != codec.dtype or v.dtype != codec.dtype:
            raise BadArray(
                f"pages of K {k.shape} {k.dtype} and V {v.shape} {v.dtype} must agree and hold {codec.dtype} cells"
            )
        if k.ndim not in (4, 5):
            raise BadArray(f"pages of rank {k.ndim}: give [page, layer, slot, head, dim] or [page, slot, head, dim]")
        if not 0 <= layer < (k.shape[1] if k.ndim == 5 else 1):
            raise BadArray(f"layer {layer} is not in pages of shape {k.shape}")
        pick = (slice(None), layer) if k.ndim == 5 else ()
        return cls(k[pick].swapaxes(1, 2)[:, None], v[pick].swapaxes(1, 2)[:, None], None, None, codec, counters)


class Table:
    def __init__(self, max_seqs: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = np.zeros((max_seqs, max_blocks), np.int32)  # [S, N] physical id of each resident block
        self.first = np.zeros((max_seqs, max_blocks), np.int32)  # [S, N] position of that block's slot 0, ascending
        self.n_blocks = np.zeros(max_seqs, np.int32)  # [S]
        self.kv_len = np.zeros(max_seqs, np.int32)  # [S] tokens written, this step's included
        self.q_start = np.zeros(max_seqs + 1, np.int32)  # [S + 1] rows of q that belong to each sequence
        self.slots = np.zeros(0, np.int64)  # [T] the cell each new token is written to; -1 is padding
        self.positions = np.zeros(0, np.int32)  # [T] the position of each new token
        self._n_blocks, self._kv_len = self.n_blocks.data, self.kv_len.data
        self._step: tuple[list[int], list[int]] = [], []  # rows and new tokens that q_start is made of

    def update(self, rows: Sequence[int], residencies: Sequence[Residency]) -> None:
        """Take over what changed. `rows` ascend; their sequences are the step, all others sit it out."""
        slots: list[int] = []
        positions: list[int] = []
        new: list[int] = []
        for row, r in zip(rows, residencies, strict=True):
            held = len(r.blocks)
            if r.changed < held:
                self.blocks[row, r.changed : held] = r.blocks[r.changed :]
                self.first[row, r.changed : held] = r.firsts[r.changed :]
            r.changed = held
            self._n_blocks[row], self._kv_len[row] = held, r.reserved
            new.append(r.reserved - r.length)
            if new[-1] == 1:
                entry = -1 if r.length >= r.firsts[-1] else r.index(r.length // self.block_size)
                slots.append(r.blocks[entry] * self.block_size + r.length - r.firsts[entry])
                positions.append(r.length)
            else:
                self._slots_of_chunk(r, slots)
                positions.extend(range(r.length, r.reserved))
        if self._step != (rows, new):  # a step of decodes is mostly like the one before
            counts = np.zeros(len(self.n_blocks), np.int32)
            counts[rows] = new
            np.cumsum(counts, out=self.q_start[1:])
            self._step = list(rows), new
        self.slots = np.array(slots, np.int64)
        self.positions = np.array(positions, np.int32)

    def _slots_of_chunk(self, r: Residency, slots: list[int]) -> None:
        pos = r.length
        while pos < r.reserved:
            entry = r.index(pos // self.block_size)
            stop = min(r.firsts[entry] + self.block_size, r.reserved)
            cell = r.blocks[entry] * self.block_size + pos - r.firsts[entry]
            slots.extend(range(cell, cell + stop - pos))
            pos = stop
