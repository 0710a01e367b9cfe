"""Restored cells are the computed ones, bit for bit, whatever strategy, layout, block size and codec."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from support import tiny_gguf
from support.harness import load_program

from kvarn import native
from kvarn.backends.base import Program
from kvarn.backends.cpu import Cpu
from kvarn.backends.reference import Reference
from kvarn.cache.cache import KVCache
from kvarn.cache.codec import CODECS, TILE, codecs_of
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.errors import BadSnapshot, NoRoomNow
from kvarn.lasting.cells import Cells, check_fits, lack_of, restore, take
from kvarn.loading.checkpoint import Checkpoint, open_checkpoint
from kvarn.models.families import graph_of

N, MORE = 150, 20


def config(strategy: str, block_size: int | None = None, **settings) -> CacheConfig:
    given = {"context": 256, "max_seqs": 2, "max_chunk": 40, "block_size": block_size}
    return CacheConfig([LayerSpec(1, 1, 8, 8)], strategy=strategy, **given | settings)


# Caches whose cells have the same bits: what a query sees is the same.
ALIKE = {
    "all": [
        config("paged", 16),
        config("paged", 64, layout="token-major"),
        config("contiguous"),
        config("contiguous", 32, layout="panel"),
        config("head-major"),
        config("repeated", 16),
        config("ring", 32),
        config("sinks", 16, pinned=0),
        config("sliding", 32),
    ],
    "window": [
        config("ring", 16, window=40),
        config("sliding", 16, window=40),
        config("sliding", 64, window=40),
        config("contiguous", window=40),
        config("paged", 32, window=40),
    ],
    "pinned": [
        config("sinks", 16, window=40, pinned=5),
        config("sinks", 32, window=40, pinned=5),
        config("paged", 16, window=40, pinned=5),
        config("contiguous", window=40, pinned=5),
    ],
}


@dataclass
class Model:
    program: Program
    backend: Cpu | Reference
    tokens: list[int]

    def cache(self, made: CacheConfig, codec: str) -> "Held":
        made = replace(made, layers=self.program.config.layer_specs, codec=codec)
        if codecs_of(codec).tail and made.block_size:
            made = replace(made, block_size=max(made.block_size, TILE))
        planned = plan(made, self.backend.default_layout)
        return Held(self, KVCache(planned), self.backend.memory(planned))


class Held:
    """A cache and its memory."""

    def __init__(self, model: Model, cache: KVCache, memory) -> None:
        self.model, self.book, self.memory = model, cache, memory

    def compute(self, seq: int, tokens: Sequence[int], chunk: int = 40) -> np.ndarray:
        """More tokens of a sequence. Their logits."""
        found = []
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            assert self.book.reserve(seq, self.book.length(seq) + len(part))
            step = self.book.prepare([seq])
            found.append(self.model.program.run(self.memory, step, part, range(len(part))).rows().copy())
            self.book.launched(step)
            self.book.commit(seq, part)
        return np.concatenate(found)

    def restored(self, seq: int, cells: Cells) -> None:
        check_fits(self.book, cells.n, cells.holes)
        if lack := lack_of(self.book, cells.n):
            raise NoRoomNow(lack)
        self.book.open(seq)
        restore(self.book, self.memory, seq, self.model.tokens[: cells.n], cells)
        self.book.check()


def fits(reader: Held, cells: Cells) -> bool:
    try:
        reader.restored(5, cells)
    except BadSnapshot:
        return False
    reader.book.abandon(5)
    return True


def checkpoint(folder: Path, variant: str) -> Checkpoint:
    return open_checkpoint(tiny_gguf.write(folder / f"{variant}.gguf", variant))


def text(n: int) -> list[int]:
    return [(7 * i * i + 3 * i) % tiny_gguf.GOLDEN.vocab_size for i in range(n)]


MODELS = ["llama cpu", "llama reference", "gemma3 cpu"]
COMBINED = [(each, alike, codec) for each in MODELS[::2] for alike in ALIKE for codec in CODECS]
SLOW = [("window", "int8"), ("pinned", "int8"), ("window", "int4"), ("pinned", "int6/f16")]
COMBINED += [("llama reference", *each) for each in SLOW]


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory) -> Iterator[Model]:
    variant, backend = request.param.split()
    found, pool = checkpoint(tmp_path_factory.mktemp("m"), variant), native.Pool(1)
    if backend == "cpu":
        yield Model(load_program(found, pool), Cpu(pool), text(N + MORE))
    else:
        place = Reference(pool)
        yield Model(place.load(found, graph_of(found.config, found.shapes), 64, lambda *_: None), place, text(N + MORE))


@pytest.mark.parametrize(("model", "alike", "codec"), COMBINED, indirect=["model"])
def test_restored_cells_and_the_logits_after_them_are_those_that_were_computed(model, alike, codec) -> None:
    n_refused = n_restored = 0
    plain = model.cache(ALIKE[alike][0], codec)
    plain.book.open(0)
    plain.compute(0, model.tokens[:N])
    wanted = plain.compute(0, model.tokens[N:])
    for made in ALIKE[alike]:
        writer = model.cache(made, codec)
        writer.book.open(0)
        writer.compute(0, model.tokens[:N], chunk=33)
        cells = take(writer.book, writer.memory, 0)
        for read in ALIKE[alike]:
            reader = model.cache(read, codec)
            before = reader.book.picture()
            if not fits(reader, cells):  # a window of small blocks, and blocks that begin before it
                assert any(cells.holes)
                assert reader.book.picture() == before
                n_refused += 1
                continue
            reader.restored(5, cells)
            n_restored += 1
            again = take(reader.book, reader.memory, 5)
            for name, rows in again.rows.items():
                layer = int(name.split(".")[1])
                ours = [at for at in range(again.n) if at not in again.holes[layer]]
                theirs = {at: i for i, at in enumerate(at for at in range(cells.n) if at not in cells.holes[layer])}
                kept = [(i, theirs[at]) for i, at in enumerate(ours) if at in theirs]
                mine, other = map(list, zip(*kept, strict=True))
                assert (rows[mine] == cells.rows[name][other]).all(), (made, read, name)
            assert cells.n == again.n == (N - N % TILE if codecs_of(codec).tail else N)
            logits = reader.compute(5, model.tokens[cells.n :])[N - cells.n :]
            assert (logits.view(np.uint32) == wanted.view(np.uint32)).all(), (made.strategy, read.strategy)
            reader.book.check()
    assert n_restored > n_refused
    if alike == "all" and model.program.config.architecture == "llama":
        assert not n_refused


def test_what_a_window_left_out_is_never_seen_again(model) -> None:
    """After a restore, a rewind goes back only to where all that is seen has cells. Nobody adopts a hollow block."""
    for strategy, size in (("ring", 16), ("contiguous", None), ("sliding", 16)):
        writer = model.cache(config("ring", 16, window=40), "f32")
        writer.book.open(0)
        writer.compute(0, model.tokens[:N])
        reader = model.cache(config(strategy, size, window=40), "f32")
        plain = model.cache(config("contiguous", window=40), "f32")
        reader.restored(0, take(writer.book, writer.memory, 0))
        for length in (N - 3, N - 20, N - 60, 30):
            kept = reader.book.rewind(0, length)
            plain.book.open(1)
            plain.compute(1, model.tokens[:kept]) if kept else None
            wanted = plain.compute(1, model.tokens[kept:N])
            assert (reader.compute(0, model.tokens[kept:N]) == wanted).all()
            plain.book.free(1)
            reader.book.check()
        reader.book.free(0)
        reader.book.check()
        if reader.book.shares:
            reader.book.open(2)
            reused = reader.book.adopt(2, model.tokens[:60]).reused
            logits = reader.compute(2, model.tokens[reused:60])
            plain.book.open(1)
            assert (logits == plain.compute(1, model.tokens[:60])[reused:]).all()


def test_a_restore_without_room_changes_nothing(model) -> None:
    writer = model.cache(config("paged", 16), "bf16")
    writer.book.open(0)
    writer.compute(0, model.tokens[:N])
    cells = take(writer.book, writer.memory, 0)
    for strategy in ("paged", "contiguous"):
        reader = model.cache(config(strategy, 16, context=208), "bf16")
        for seq in (0, 1):
            reader.book.open(seq)
            reader.compute(seq, model.tokens[: 160 + seq])
        before = reader.book.picture()
        with pytest.raises(NoRoomNow):
            reader.restored(7, cells)
        assert reader.book.picture() == before
    short = model.cache(config("paged", 16, context=N), "bf16")
    with pytest.raises(BadSnapshot, match="raise the context"):
        short.restored(7, cells)


def test_memory_that_does_not_keep_what_is_written_is_noticed(model, monkeypatch) -> None:
    writer = model.cache(config("paged", 16), "bf16")
    writer.book.open(0)
    writer.compute(0, model.tokens[:N])
    cells = take(writer.book, writer.memory, 0)
    reader = model.cache(config("paged", 16), "bf16")
    before = reader.book.picture()
    monkeypatch.setattr(type(reader.memory), "write_block", lambda self, group, block, data: None)
    with pytest.raises(ValueError, match="did not keep"):
        reader.restored(7, cells)
    reader.book.check()
    assert reader.book.picture() == before
