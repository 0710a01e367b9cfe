"""Kernels over page arrays that the caller owns, in two formats.

`[pages, layers, block, heads, dim]` holds all layers of a page together, `[pages, block, heads, dim]` one layer. Both
are used in place: a store over pages is a view.
"""

import numpy as np
import pytest
from support.harness import assert_near, backend, bits, expect, inputs
from support.pager import SPEC
from support.pages import over_pages

from kvarn.backends.base import Counters
from kvarn.backends.host import Table
from kvarn.cache.codec import CODECS
from kvarn.errors import BadArray


def table_over(blocks: list[int], block_size: int, length: int, new: int) -> Table:
    table = Table(1, len(blocks), block_size)
    table.blocks[0], table.first[0] = blocks, np.arange(len(blocks)) * block_size
    table.n_blocks[0], table.kv_len[0], table.q_start[1] = len(blocks), length, new
    cell = np.arange(length - new, length)
    table.cells = np.array([blocks[p // block_size] * block_size + p % block_size for p in cell])
    return table


@pytest.mark.requirement(14)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if not codec.scale_unit])
def test_both_page_formats_hold_the_same_cells_and_give_the_same_bits(codec: str) -> None:
    """[pages, layers, block, heads, dim] and [pages, block, heads, dim] hold the same cells and give the same bits."""
    pages, layers, block, layer = 7, 3, 16, 1
    dtype = np.dtype(CODECS[codec].unit)
    x = inputs(SPEC, 50, seed=4)
    k5, v5 = np.zeros((2, pages, layers, block, 2, 8), dtype)
    k4, v4 = np.zeros((2, pages, block, 2, 8), dtype)
    stores = [
        over_pages(k5, v5, CODECS[codec], Counters(), layer=layer),
        over_pages(k4, v4, CODECS[codec], Counters()),
    ]
    table = table_over([5, 2, 6, 0], block, 50, 50)
    results = []
    for store in stores:
        backend().kernels.write(x.k, x.v, store, table)
        results.append(np.zeros_like(x.q))
        backend().kernels.prefill(x.q, store, table, SPEC, 8**-0.5, results[-1])
    assert (bits(results[0]) == bits(results[1])).all()
    assert_near(results[0], expect(x, SPEC, codec))
    assert (k5[:, layer] == k4).all()
    assert not k5[:, [0, 2]].any(), "the other layers were not touched"
    for pages_of, store in zip((k5, k4), stores, strict=True):
        assert np.shares_memory(store.k, pages_of)


@pytest.mark.requirement(14)
@pytest.mark.parametrize("rank", [1, 2, 3, 6])
def test_pages_of_other_ranks_are_refused(rank: int) -> None:
    pages = np.zeros((2,) * rank, np.float32)
    with pytest.raises(BadArray, match=f"rank {rank}"):
        over_pages(pages, pages, CODECS["f32"], Counters())


@pytest.mark.requirement(14)
def test_pages_that_disagree_in_shape_type_or_layer_are_refused() -> None:
    k, v = np.zeros((2, 16, 2, 8), np.float32), np.zeros((2, 16, 3, 8), np.float32)
    for bad in ((k, v, "f32"), (k, k, "f16"), (k.astype(np.int8), k.astype(np.int8), "int8")):
        with pytest.raises(BadArray):
            over_pages(*bad[:2], CODECS[bad[2]], Counters())
    for layer in (-1, 3):
        with pytest.raises(BadArray, match="is not in pages"):
            over_pages(
                np.zeros((2, 3, 16, 2, 8), np.float32),
                np.zeros((2, 3, 16, 2, 8), np.float32),
                CODECS["f32"],
                Counters(),
                layer=layer,
            )


@pytest.mark.requirement(45)
def test_a_store_over_pages_is_a_view_and_a_stack_is_not() -> None:
    pages = [np.zeros((16, 1, 8), np.float32) for _ in range(4)]
    stacked = np.stack(pages)
    assert not any(np.shares_memory(stacked, page) for page in pages)
    store = over_pages(stacked, stacked.copy(), CODECS["f32"], Counters())
    assert np.shares_memory(store.k, stacked)
    store.k[2, 0, 0, 3] = 5
    assert (stacked[2, 3, 0] == 5).all()
