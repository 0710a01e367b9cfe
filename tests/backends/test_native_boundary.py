"""What kernels are given is checked once, at the boundary: a ValueError that says what is wrong, never a crash."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pytest
from support.harness import Driven, pool
from support.native_program import emitted
from support.tiny_files import write_gguf
from support.tiny_models import LOADING

from kvarn import native
from kvarn.backends.cpu import Cpu
from kvarn.backends.cpu.emit import Weights, emit
from kvarn.backends.reference.codecs import DEFINITIONS, Encoded
from kvarn.cache.plan import CacheConfig
from kvarn.errors import KvarnError
from kvarn.graph.fuse import fuse
from kvarn.graph.ops import Ops, V
from kvarn.graph.record import Heads, record
from kvarn.loading.checkpoint import open_checkpoint
from kvarn.loading.quants import grid_of
from kvarn.models.config import ModelConfig

BLOCKS, BLOCK, KV, HEADS, DIM, TOKENS = 6, 32, 2, 4, 8, 40


@dataclass
class Given:
    """A step of one sequence, two blocks, 40 tokens of which 3 are new; each test spoils one part."""

    k: np.ndarray = field(default_factory=lambda: np.zeros((BLOCKS, 1, KV, BLOCK, DIM), np.float32))
    v: np.ndarray = field(default_factory=lambda: np.zeros((BLOCKS, 1, KV, BLOCK, DIM), np.float32))
    k_scale: np.ndarray | None = None
    v_scale: np.ndarray | None = None
    k_tail: np.ndarray | None = None
    v_tail: np.ndarray | None = None
    k_tail_scale: np.ndarray | None = None
    v_tail_scale: np.ndarray | None = None
    codec: int = 0
    dim: int = DIM
    group: int = 0
    blocks: np.ndarray = field(default_factory=lambda: np.array([[4, 1, 0]], np.int32))
    first: np.ndarray = field(default_factory=lambda: np.array([[0, 32, 0]], np.int32))
    n_blocks: np.ndarray = field(default_factory=lambda: np.array([2], np.int32))
    kv_len: np.ndarray = field(default_factory=lambda: np.array([TOKENS], np.int32))
    q_start: np.ndarray = field(default_factory=lambda: np.array([0, 3], np.int32))
    heads: tuple[int, int, int, int] = (HEADS, KV, -1, 0)
    cells: np.ndarray = field(default_factory=lambda: np.array([37, 38, 39], np.int64))
    fresh: np.ndarray = field(default_factory=lambda: np.zeros((3, KV, DIM), np.float32))
    q: np.ndarray = field(default_factory=lambda: np.zeros((3, HEADS, DIM), np.float32))
    out: np.ndarray = field(default_factory=lambda: np.zeros((3, HEADS, DIM), np.float32))
    layer: int = 0

    def run(self) -> None:
        view = native.CacheView()
        view.add_group(self.blocks, self.first, self.n_blocks, self.kv_len, self.q_start, *self.heads)
        tails = (self.k_tail, self.v_tail, self.k_tail_scale, self.v_tail_scale)
        arrays = (self.k, self.v, self.k_scale, self.v_scale, *tails)
        view.add_layer(*arrays, self.codec, self.codec, self.dim, self.group)
        view.set_cells(0, self.cells)
        fresh = native.FreshRows()
        view.write(self.layer, self.fresh, self.fresh, fresh)
        native.attend(pool(), view, self.layer, self.q, self.out, 1.0, True, True, fresh)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def cells(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


CODES = cells(BLOCKS, 1, KV, BLOCK, 8, dtype=np.uint32)  # a row is a block of 32 numbers, four in a word
INT8 = dict(k=CODES, v=CODES.copy(), codec=native.Codec.int8)
SCALES = cells(BLOCKS, 1, KV, BLOCK)
CODES4 = cells(BLOCKS, 1, KV, BLOCK, 4, dtype=np.uint32)
INT4 = dict(
    k=CODES4,
    v=CODES4.copy(),
    k_scale=cells(BLOCKS, 1, KV, BLOCK, 1, dtype=np.uint8),
    v_scale=cells(BLOCKS, 1, KV, BLOCK, 1, dtype=np.uint8),
    k_tail=CODES[:2].copy(),
    v_tail=CODES[:2].copy(),
    k_tail_scale=SCALES[:2].copy(),
    v_tail_scale=SCALES[:2].copy(),
    codec=native.Codec.int4,
)
BAD = {
    "no tail": (INT4 | dict(v_tail=None), "need a v_tail"),
    "no scales of the tail": (INT4 | dict(v_tail_scale=None), "need a v_tail"),
    "a tail of one block": (
        INT4 | dict(k_tail=CODES[:1], k_tail_scale=SCALES[:1]),
        "two blocks of 32 slots for each of 1",
    ),
    "a tail of short blocks": (
        INT4 | dict(k_tail=CODES[:2, :, :, :16], k_tail_scale=SCALES[:2, :, :, :16]),
        "two blocks of 32 slots",
    ),
    "scale codes of f32": (INT4 | dict(k_scale=SCALES), "k_scale is uint8"),
    "too few scale codes": (INT4 | dict(v_scale=cells(BLOCKS, 1, KV, BLOCK, 0, dtype=np.uint8)), "v_scale is uint8"),
    "blocks of 16 with a tail": (
        INT4 | {name: INT4[name][:, :, :, :16] for name in ("k", "v", "k_scale", "v_scale")},
        "multiple of 32 slots, not 16",
    ),
    "a cell elsewhere in its tile": (
        INT4 | dict(cells=np.array([37, 38, 40], np.int64)),
        "position 39 and its cell 40",
    ),
    "cells of another rank": (dict(k=cells(BLOCKS, KV, BLOCK, DIM)), r"\[block, panel, head, slot, dim\]"),
    "cells of another type": (dict(k=cells(BLOCKS, 1, KV, BLOCK, DIM, dtype=np.float16)), "of float16"),
    "K and V that differ": (dict(v=cells(BLOCKS + 1, 1, KV, BLOCK, DIM)), "K is .* V is"),
    "rows of another length": (dict(v=cells(BLOCKS, 1, KV, BLOCK, DIM + 1)), "heads of 8 numbers have 8 cells"),
    "no cells": (dict(k=cells(0, 1, KV, BLOCK, DIM), v=cells(0, 1, KV, BLOCK, DIM)), "K is"),
    "panels of 8": (dict(k=cells(BLOCKS, 4, KV, 8, DIM), v=cells(BLOCKS, 4, KV, 8, DIM)), "multiple of 16"),
    "wide heads": (dict(k=cells(1, 1, KV, 16, 257), v=cells(1, 1, KV, 16, 257), dim=257), "up to 256"),
    "heads of neither": (
        dict(k=cells(BLOCKS, 1, 3, BLOCK, DIM), v=cells(BLOCKS, 1, 3, BLOCK, DIM)),
        "neither the 2 KV",
    ),
    "17 heads share one": (dict(heads=(34, 2, -1, 0)), "at most 16 query heads"),
    "heads that do not divide": (dict(heads=(5, 2, -1, 0)), "5 query heads over 2"),
    "no heads": (dict(heads=(4, 0, -1, 0)), "over 0 KV heads"),
    "a window of 0": (dict(heads=(4, 2, 0, 0)), "window of 0"),
    "pinned below 0": (dict(heads=(4, 2, 8, -1)), "-1 pinned"),
    "no scales": (INT8, "need a k_scale"),
    "scales of f64": (INT8 | dict(k_scale=SCALES.astype(np.float64), v_scale=SCALES), "k_scale is float32.*float64"),
    "scales of another shape": (INT8 | dict(k_scale=SCALES, v_scale=SCALES[:, :, :, :16]), "v_scale is float32"),
    "an unknown codec": (dict(codec=len(native.Codec)), "unknown codec"),
    "an unknown group": (dict(group=1), "group 1"),
    "an unknown layer": (dict(layer=1), "layer 1"),
    "blocks of i64": (dict(blocks=np.zeros((1, 3), np.int64)), "table.blocks.*int32 is needed.*int64"),
    "rows with gaps": (dict(kv_len=np.array([TOKENS, 0], np.int32)[:1], q_start=np.zeros(4, np.int32)[::2]), "strides"),
    "tables that differ": (dict(first=np.zeros((1, 4), np.int32)), r"\[1, 4\]"),
    "q_start too short": (dict(q_start=i32(0)), r"q_start \[S \+ 1\]"),
    "q_start that falls": (
        dict(
            blocks=np.zeros((2, 3), np.int32),
            first=np.array([[0, 32, 0]] * 2, np.int32),
            n_blocks=i32(2, 2),
            kv_len=i32(9, 9),
            q_start=i32(0, 5, 3),
        ),
        "falls at sequence 1",
    ),
    "q_start from 1": (dict(q_start=i32(1, 3)), "begins with 1"),
    "more blocks than a row": (dict(n_blocks=i32(4)), "4 blocks in a row of 3"),
    "blocks below 0": (dict(n_blocks=i32(-1)), "-1 blocks"),
    "a block outside": (dict(blocks=np.array([[4, 6, 0]], np.int32)), "block 6 lies outside the store of 6"),
    "a negative block": (dict(blocks=np.array([[-1, 1, 0]], np.int32)), "block -1"),
    "positions that fall": (dict(first=np.array([[32, 0, 0]], np.int32)), "ascend"),
    "positions off the grid": (dict(first=np.array([[0, 33, 0]], np.int32)), "entry 1 has 33"),
    "a block that is missing": (dict(n_blocks=i32(1)), "sees position 32"),
    "the first block missing": (dict(blocks=np.array([[1, 4, 0]], np.int32), first=i32(32, 64, 0)[None]), "position 0"),
    "pinned and missing": (
        dict(heads=(4, 2, 4, 6), blocks=np.array([[1, 4, 0]], np.int32), first=i32(32, 64, 0)[None]),
        "sees position 0",
    ),
    "more than the blocks hold": (dict(kv_len=i32(65)), "sees position 64"),
    "fewer tokens than are new": (dict(kv_len=i32(2)), "2 tokens are written, 3 of them new"),
    "a cell outside": (dict(cells=np.array([0, 1, BLOCKS * BLOCK], np.int64)), "cell 192 lies outside"),
    "a cell below -1": (dict(cells=np.array([0, 1, -2], np.int64)), "cell -2"),
    "too few cells": (dict(cells=np.array([0, 1], np.int64)), "3 and not 2"),
    "cells of i32": (dict(cells=i32(0, 1, 2)), "table.cells.*int64 is needed"),
    "keys of f64": (dict(fresh=cells(3, KV, DIM, dtype=np.float64)), "write: k.*float32 is needed.*float64"),
    "keys of other heads": (dict(fresh=cells(3, HEADS, DIM)), "3 new tokens, 2 KV heads, 8"),
    "keys with gaps": (dict(fresh=cells(3, KV, 2 * DIM)[:, :, ::2]), r"strides \[32, 16, 2\]"),
    "queries of another rank": (dict(q=cells(3, HEADS * DIM)), "attention: q"),
    "too few queries": (dict(q=cells(2, HEADS, DIM), out=cells(2, HEADS, DIM)), "3 new tokens, 4 heads"),
    "queries of f16": (dict(q=cells(3, HEADS, DIM, dtype=np.float16)), "float32 is needed"),
    "an output of another shape": (dict(out=cells(3, HEADS, 9)), "q and out"),
}


ROWS_SEE = [1 / 38, 2 / 39, 3 / 40]  # of the keys that a row sees, the part that the step wrote
VALID = {
    "f32": ({}, ROWS_SEE),
    "int8": (
        dict(k=CODES.copy(), v=CODES.copy(), codec=native.Codec.int8, k_scale=SCALES.copy(), v_scale=SCALES.copy()),
        ROWS_SEE,
    ),
    "a window of 4": (dict(heads=(HEADS, KV, 4, 0)), [1 / 4, 2 / 4, 3 / 4]),
    "padding": (dict(kv_len=i32(0), cells=np.full(3, -1)), [0, 0, 0]),
}


@pytest.mark.parametrize(("change", "seen"), VALID.values(), ids=VALID)
def test_a_valid_step_writes_its_cells_and_attends_to_them(change: dict, seen: list[float]) -> None:
    """Queries of zero weigh all keys alike. All values are zero but those that the step writes, which are two."""
    given = Given(fresh=np.full((3, KV, DIM), 2, np.float32), **change)
    given.run()
    for stored, scale in ((given.k, given.k_scale), (given.v, given.v_scale)):
        codec = DEFINITIONS["int8" if given.codec == native.Codec.int8 else "int4"]
        values = stored if scale is None else codec.decode(Encoded(stored, scale), DIM)
        assert np.allclose(values[1, 0, :, 5:8], 2 if any(seen) else 0)  # cells 37, 38, 39: block 1, slots 5 to 7
        assert np.allclose(values.sum(), 2 * 3 * KV * DIM if any(seen) else 0), "no other cell"
    assert np.allclose(given.out, 2 * np.array(seen)[:, None, None], rtol=1e-2)


def test_padding_writes_no_cell_and_no_tail() -> None:
    arrays = {name: array.copy() for name, array in INT4.items() if name != "codec"}
    given = Given(**arrays, codec=native.Codec.int4, kv_len=i32(0), cells=np.full(3, -1))
    given.fresh, given.out = given.fresh + 1, given.out + 7
    given.run()
    assert not given.out.any()
    assert all((arrays[name] == INT4[name]).all() for name in arrays)


@pytest.mark.parametrize(("spoiled", "message"), BAD.values(), ids=BAD)
def test_an_invalid_cache_is_refused(spoiled: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Given(**spoiled).run()


def test_cells_live_as_long_as_the_view() -> None:
    view = native.CacheView()
    given = Given()
    view.add_group(given.blocks, given.first, given.n_blocks, given.kv_len, given.q_start, *given.heads)
    view.add_layer(given.k, given.v, *[None] * 6, 0, 0, DIM, 0)
    view.set_cells(0, np.array([37, 38, 39], np.int64))  # this is the only reference
    np.full(3, 10**9)
    given.fresh += 1
    view.write(0, given.fresh, given.fresh, native.FreshRows())
    assert given.k.sum() == given.fresh.sum()


PACK = {
    "an unknown type": (("Q9_9", cells(2, 18, dtype=np.uint8), 32), "no weights of type Q9_9"),
    "the name of a form": (("table, i8 per 16", cells(2, 18, dtype=np.uint8), 32), "no weights of type"),
    "half a block": (("Q4_0", cells(2, 9, dtype=np.uint8), 16), "no whole blocks"),
    "half a block of 256": (("Q4_K", cells(2, 72, dtype=np.uint8), 128), "no whole blocks"),
    "rows too short": (("Q4_0", cells(2, 17, dtype=np.uint8), 32), "is 18 bytes"),
    "rows too long": (("F32", cells(2, 32, dtype=np.uint8), 4), "is 16 bytes"),
    "no rows": (("Q4_0", cells(0, 18, dtype=np.uint8), 32), "18 bytes"),
    "no columns": (("F32", cells(2, 0, dtype=np.uint8), 0), "rows of 0"),
    "fewer than no columns": (("F32", cells(2, 4, dtype=np.uint8), -1), "rows of -1"),
    "rows of i8": (("Q4_0", cells(2, 18, dtype=np.int8), 32), "contiguous uint8 is needed"),
    "a vector": (("Q4_0", cells(18, dtype=np.uint8), 32), "2 dimensions"),
    "no grid": (("IQ2_XXS", cells(2, 66, dtype=np.uint8), 256), r"needs its grid, \[256, 8\]"),
    "another type's grid": (("IQ2_XXS", cells(2, 66, dtype=np.uint8), 256, grid_of("IQ2_XS")), "needs its grid"),
    "a grid of other numbers": (("IQ2_XXS", cells(2, 66, dtype=np.uint8), 256, np.ones((256, 8), np.int8)), "its grid"),
    "a grid of no numbers": (("IQ1_S", cells(2, 50, dtype=np.uint8), 256, np.full((2048, 8), 2, np.int8)), "its grid"),
    "rows with gaps": (("Q4_0", cells(2, 36, dtype=np.uint8)[:, ::2], 32), "strides"),
}


@pytest.mark.parametrize(("arguments", "message"), PACK.values(), ids=PACK)
def test_invalid_weights_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.pack(pool(), *arguments)


def test_invalid_memory_to_unpack_into_is_refused() -> None:
    weight = native.pack(pool(), "F32", cells(2, 16, dtype=np.uint8), 4)
    for out in (cells(2, 5), cells(1, 4), cells(8), cells(2, 4, dtype=np.float64), cells(2, 8)[:, ::2]):
        with pytest.raises(ValueError, match="unpack"):
            weight.unpack(out)


# -- programs ---------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    tokens: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    logits: np.ndarray


STEPS = {
    "a token outside": (
        dict(tokens=np.array([1, 2, LOADING.vocab_size])),
        "token 48 lies outside the vocabulary of 48",
    ),
    "a negative token": (dict(tokens=np.array([1, -2, 3])), "token -2"),
    "tokens of i32": (dict(tokens=i32(1, 2, 3)), "run: tokens.*int64 is needed"),
    "too many tokens": (dict(tokens=np.arange(4), positions=i32(0, 1, 2, 3)), "prepared for 3 tokens, not for 4"),
    "too few positions": (dict(positions=i32(0, 1)), "one position per token"),
    "a negative position": (dict(positions=i32(0, -1, 2)), "position -1"),
    "a row outside": (dict(rows=np.array([3])), "row 3 lies outside the step of 3"),
    "a negative row": (dict(rows=np.array([-1])), "row -1"),
    "logits of another shape": (dict(logits=cells(1, 47)), r"vocabulary rounded up to 16\], not \[1, 47\]"),
    "logits of f64": (dict(logits=cells(1, 48, dtype=np.float64)), "run: logits"),
}


class Loaded(NamedTuple):
    config: ModelConfig
    native: native.Program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory):
    checkpoint = open_checkpoint(write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "llama"))
    return Loaded(checkpoint.config, emitted(checkpoint, pool()))


def prepared(specs) -> Driven:
    cache = Driven(CacheConfig(specs, 64, "paged", "f32"), Cpu(pool()))
    cache.open(0)
    cache.reserve(0, 3)
    cache.prepare([0])
    return cache


def run(program, cache: Driven, **spoiled) -> None:
    right = dict(tokens=np.arange(3), positions=i32(0, 1, 2), rows=np.array([2]), logits=cells(1, LOADING.vocab_size))
    given = Step(**(right | spoiled))
    program.native.run(cache.memory.view, given.tokens, given.positions, given.rows, given.logits)


@pytest.mark.parametrize(("spoiled", "message"), STEPS.values(), ids=STEPS)
def test_an_invalid_step_is_refused(program, spoiled: dict, message: str) -> None:
    cache = prepared(program.config.layer_specs)
    with pytest.raises(ValueError, match=message):
        run(program, cache, **spoiled)
    run(program, cache)


def test_a_cache_of_another_model_is_refused(program) -> None:
    specs = program.config.layer_specs
    spec = specs[0]
    with pytest.raises(ValueError, match="layer 1 is not in a cache of 1 layers"):
        run(program, prepared(specs[:1]))
    for changed, message in (
        (dict(n_heads=2 * spec.n_heads), "4 query heads, the cache has 8"),
        (dict(n_kv_heads=1), "2 KV heads, the cache has 1"),
        (dict(k_dim=16, v_dim=16), "heads of 8, the cache has 16"),
    ):
        other = replace(spec, **changed)
        with pytest.raises(ValueError, match=message):
            run(program, prepared([other] * len(specs)))


def test_a_table_with_a_missing_or_unknown_block_is_refused(program) -> None:
    for spoil, message in (
        (lambda table: table.n_blocks.__setitem__(0, 0), "sees position 0, which no block of it holds"),
        (lambda table: table.blocks.__setitem__((0, 0), 99), "block 99 lies outside"),
    ):
        cache = prepared(program.config.layer_specs)
        spoil(cache.tables[0])
        with pytest.raises(ValueError, match=message):
            run(program, cache)


def test_a_product_that_does_not_directly_follow_its_input_is_refused() -> None:
    """There is one set of rounded rows: those of the second norm would be multiplied twice."""

    def forward(ops: Ops[V], config: object) -> V:
        x = ops.embed("embed")
        one, two = ops.rms_norm(x, "norm"), ops.rms_norm(x, "norm")
        q, k, v = ops.linear(one, "m"), ops.linear(one, "m"), ops.linear(two, "m")
        return ops.logits(ops.attention(0, q, k, v, 1.0), "embed")

    packed = native.pack(pool(1), "F32", np.ones((32, 32), np.float32).view(np.uint8), 32)
    weights = Weights({"embed": packed, "m": packed}, {"norm": np.ones(32, np.float32)})
    shapes = {"embed": (32, 32), "m": (32, 32), "norm": (32,)}
    fused = fuse(record(forward, Heads(1, 1, 32), shapes))
    with pytest.raises(KvarnError, match="no longer the last ones rounded"):
        emit(fused, 1e-5, weights, native.Program(pool(1)))


def test_products_without_room_for_their_rows_are_refused() -> None:
    """Logits of all tokens would be written past those of the wanted rows."""
    matrix = native.zeros("F32", 16, 32)
    for wanted_before, wanted, logits, segments, message in (
        (False, False, True, [(matrix, None, -1, False)], "with the wanted rows"),
        (False, True, True, [(matrix, None, -1, False)], 'other rows than "norm"'),
        (True, True, True, [(matrix, None, -1, False)] * 2, "one matrix"),
        (False, False, False, [(native.zeros("F32", 16, 64), None, 2, False)], "64 columns reads rows of 32"),
        (False, False, False, [(matrix, None, 0, False)], "matrix of 16 rows is no buffer of that width"),
        (False, False, False, [(matrix, None, -1, False)], "matrix of 16 rows is no buffer of that width"),
    ):
        program = native.Program(pool(1))
        buffers = [program.buffer(width) for width in (32, 32, 16)]
        with pytest.raises(ValueError, match="made rows for it"):
            program.linear("product", wanted, logits, segments)
        program.norm_round("norm", wanted_before, *buffers[:2], None, 0.0, False, False)
        with pytest.raises(ValueError, match=message):
            program.linear("product", wanted, logits, segments)
        program.norm_round("last", True, *buffers[:2], None, 0.0, False, False)
        program.linear("logits", True, True, [(matrix, None, -1, False)])
        with pytest.raises(ValueError, match="follows the logits"):
            program.add("add", True, *buffers[:2])
