"""The cache on the device against the memory of the reference, under random operations: every table and every byte.

Sequences open, share prefixes, fork, rewind, go round rings and end. Both memories apply the same steps.
"""

import random
from collections import Counter
from itertools import accumulate

import numpy as np
import pytest

from kvarn.backends.cuda import inbox
from kvarn.backends.cuda.layers import CudaLayers
from kvarn.backends.cuda.memory import CudaMemory
from kvarn.backends.reference import Reference
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.step import Copy

FULL = LayerSpec(2, 1, 8, 8)
LOCAL = LayerSpec(2, 1, 8, 8, window=24)
SMALL = dict(context=112, block_size=16, max_chunk=20, max_seqs=4, codec="bf16")
CONFIGS: dict[str, CacheConfig] = {
    "contiguous": CacheConfig([FULL], strategy="contiguous", **(SMALL | dict(block_size=None))),
    "slab of blocks": CacheConfig([FULL], strategy="contiguous", layout="token-major", **SMALL),
    "repeated": CacheConfig([FULL], strategy="repeated", **SMALL),
    "ring": CacheConfig([FULL, FULL], strategy="ring", window=24, **SMALL),
    "sinks": CacheConfig([FULL], strategy="sinks", window=30, pinned=20, **SMALL),
    "sliding": CacheConfig([FULL], strategy="sliding", window=24, **SMALL),
    "sliding, pinned": CacheConfig([FULL], strategy="sliding", window=30, pinned=20, **SMALL),
    "paged": CacheConfig([FULL, FULL], strategy="paged", **SMALL),
    "paged, f32": CacheConfig([FULL], strategy="paged", layout="token-major", **(SMALL | dict(codec="f32"))),
    "paged, int8": CacheConfig([FULL, FULL], strategy="paged", **(SMALL | dict(codec="int8"))),
    "paged, int4": CacheConfig([FULL], strategy="paged", **(SMALL | dict(codec="int4", block_size=32))),
    "two groups": CacheConfig([LOCAL, FULL], strategy="paged", **(SMALL | dict(codec="f16"))),
    "two groups, ring": CacheConfig([LOCAL, FULL], strategy="ring", window=40, **SMALL),
}


class Mirror:
    """A book, and two memories that are given its steps and the same keys and values."""

    def __init__(self, driver, config: CacheConfig, seed: int) -> None:
        planned = plan(config, "head-major")
        self.book = KVCache(planned)
        self.memory = CudaMemory(driver, planned)
        self.device, self.host = CudaLayers(self.memory), Reference().layers(planned)
        driver.fill(self.memory.arena.address, 0xFF, self.memory.arena.nbytes)
        self.host.arena[...] = 0xFF
        self.rng, self.next = random.Random(seed), 0
        self.texts: dict[int, list[int]] = {}
        self.happened: Counter[str] = Counter()

    def act(self) -> None:
        verbs = [self.open, self.fork, self.rewind, self.end, *[self.step] * 5]
        verb = self.rng.choice(verbs) if self.texts else self.open
        verb()
        self.book.check()

    def open(self) -> None:
        if len(self.texts) == SMALL["max_seqs"]:
            return
        self.book.open(self.next)
        self.texts[self.next] = []
        prompt = [self.rng.randrange(2) for _ in range(3)] + [7] * 40  # prompts that begin in few ways
        if self.rng.random() < 0.7 and (reused := self.book.adopt(self.next, prompt).reused):
            self.texts[self.next] = prompt[:reused]
            self.happened["reuse"] += 1
        self.next += 1

    def fork(self) -> None:
        if len(self.texts) < SMALL["max_seqs"]:
            parent = self.rng.choice(list(self.texts))
            if self.book.fork(parent, self.next):
                self.texts[self.next] = self.texts[parent][: self.book.length(self.next)]
                self.happened["fork"] += bool(self.texts[parent])
            self.next += 1

    def rewind(self) -> None:
        seq = self.rng.choice(list(self.texts))
        length = self.book.rewind(seq, self.rng.randrange(len(self.texts[seq]) + 1))
        self.happened["rewind"] += 0 < length < len(self.texts[seq])
        self.texts[seq] = self.texts[seq][:length]

    def end(self) -> None:
        seq = self.rng.choice(list(self.texts))
        self.book.free(seq)
        del self.texts[seq]

    def step(self) -> None:
        new: dict[int, list[int]] = {}
        for seq in self.rng.sample(list(self.texts), self.rng.randrange(1, len(self.texts) + 1)):
            length = len(self.texts[seq])
            n = min(self.rng.choice((1, 1, 3, 17, 20)), SMALL["context"] - length)
            if n and self.book.reserve(seq, length + n):
                new[seq] = [(self.rng.randrange(2) if length + i < 3 else 7) for i in range(n)]
        if not new:
            return
        step = self.book.prepare(list(new))
        for group, changes in zip(self.book.plan.groups, step.groups, strict=True):
            pairs = inbox._edits(group, changes.edits)
            assert len(set(pairs[::2])) == len(pairs) // 2, "two writes of one entry: their order is not defined"
            self.happened["moves"] += len(changes.moves)
        for layers in (self.device, self.host):
            layers.apply(step)
        self.check_tables(step)
        numbers = np.random.default_rng(self.rng.randrange(1 << 30))
        rows = numbers.standard_normal((len(step.positions), 1, 8), np.float32)
        for layer in range(self.book.plan.n_layers):
            for layers in (self.device, self.host):
                layers.write(layer, rows + np.float32(layer), -rows)
        for seq in step.seqs:
            self.book.advance(seq, len(new[seq]))
            self.book.commit(seq, new[seq])
            self.texts[seq] += new[seq]

    def check_tables(self, step) -> None:
        """An entry's block, and which logical block it is, as kernels find it."""
        for index, (group, placement) in enumerate(zip(self.book.plan.groups, self.book.placements, strict=True)):
            found, shifts = self.table(index)
            ends = accumulate(step.n_new)
            for seq, row, end, n in zip(step.seqs, step.rows, ends, step.n_new, strict=True):
                (shift,) = set(shifts[end - n : end].tolist())
                for entry, (block, first) in enumerate(placement.blocks(seq)):
                    logical = first // group.config.block_size
                    pinned = logical < group.config.pinned_blocks
                    assert found[row, logical if pinned else logical - shift] == block, (seq, entry)

    def table(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks by row, and the shift of each token of the step."""
        on_device, group = self.memory._groups[index], self.book.plan.groups[index]
        shape = (self.book.plan.max_seqs, group.blocks_per_sequence)
        view, frame = self.memory.driver.view, self.device._checked_frame()
        return view(on_device.table, shape, np.int32), view(frame.groups[index].shifts, (frame.n_tokens,), np.int32)

    def check_bytes(self) -> None:
        for index, group in enumerate(self.book.plan.groups):
            for block in range(group.config.n_blocks):
                assert self.memory.read_block(index, block) == self.host.read_block(index, block), (index, block)


@pytest.mark.parametrize("name", CONFIGS)
def test_tables_and_bytes_are_those_of_the_reference(driver, name: str) -> None:
    happened: Counter[str] = Counter()
    coded = "int" in CONFIGS[name].codec  # the interpreter takes long to encode
    for seed in (1,) if coded else (1, 2):
        mirror = Mirror(driver, CONFIGS[name], seed)
        for _ in range(30 if coded else 60):
            mirror.act()
        mirror.check_bytes()
        counters = mirror.memory.counters
        assert (counters.written, counters.copied) == (mirror.host.counters.written, mirror.host.counters.copied)
        happened += mirror.happened
    if coded:
        return
    assert happened["fork"], "the schedule shows little"
    assert happened["rewind"], "the schedule shows little"
    assert happened["moves"], "the schedule shows little"
    assert happened["reuse"] or not mirror.book.shares


def test_moves_of_one_launch_do_not_touch_each_other() -> None:
    moves = [Copy(0, 1, 16), Copy(0, 2, 3), Copy(1, 3, 16), Copy(4, 0, 2), Copy(5, 6, 1), Copy(7, 6, 9)]
    waves = inbox._waves(moves)
    assert [wave[0::3] for wave in waves] == [[0, 0], [1, 4, 5], [7]]
    assert [number for wave in waves for number in wave] == [number for move in moves for number in move], (
        "all moves, in order"
    )
    assert inbox._waves([Copy(0, 1, 2), Copy(3, 0, 2)]) == [[0, 1, 2], [3, 0, 2]], "block 0 is read first"
    assert inbox._waves([]) == []


def test_a_chain_of_moves_runs_in_order(driver) -> None:
    """Block 0 to 1, then 1 to 2, then another to 0: as one launch they would race."""
    planned = plan(CacheConfig([FULL, FULL], 64, "paged", "bf16", block_size=16), "head-major")
    memory, host = CudaMemory(driver, planned), Reference().layers(planned)
    for block in range(4):
        data = np.random.default_rng(block).integers(0, 256, len(host.read_block(0, 0))).astype(np.uint8).tobytes()
        memory.write_block(0, block, data)
        host.write_block(0, block, data)
    book = KVCache(planned)
    book.open(0)
    assert book.reserve(0, 1)
    step = book.prepare([0])
    moves = [Copy(0, 1, 16), Copy(1, 2, 5), Copy(3, 0, 16), Copy(2, 3, 1)]
    step = step._replace(groups=(step.groups[0]._replace(moves=moves),))
    memory.apply(step)
    host.apply(step)
    assert [memory.read_block(0, b) for b in range(4)] == [host.read_block(0, b) for b in range(4)]
    assert len(driver.launches("copy")) == 3
    assert memory.counters.copied == (16 + 5 + 16 + 1) * planned.bytes_per_token
