"""Where the keys and values of a sequence lie in memory.

A layout maps (block, head, slot) to bytes. Token-major stores `[seq, n_kv_heads, head_dim]`; head-major stores one
head's tokens after each other; repeated stores a copy for every query head. The history is a view, never a copy.
"""

import itertools

import numpy as np
import pytest
from support.caches import SPEC, cache_of, write_step
from support.harness import Driven, history, inputs

from kvarn.backends.reference import Reference
from kvarn.backends.reference.cells import repeat_heads
from kvarn.cache.layout import BlockShape
from kvarn.cache.layouts import LAYOUTS
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.errors import KvarnError


@pytest.mark.requirement(1)
@pytest.mark.usefixtures("backend")
def test_token_major_history_has_the_canonical_shape_and_strides() -> None:
    cache = cache_of(layout="token-major", max_seqs=2)
    x = {seq: inputs(SPEC, 9, seed=seq) for seq in (0, 1)}
    for seq in x:
        cache.open(seq)
        write_step(cache, x[seq].k, x[seq].v, seq)
    views = []
    for seq in x:
        ((block, _),) = cache.placements[0].blocks(seq)
        k, v = history(cache.stores[0], block, 9)
        assert k.shape == v.shape == (9, SPEC.n_kv_heads, SPEC.k_dim)
        assert k.strides == v.strides == (SPEC.n_kv_heads * SPEC.k_dim * 4, SPEC.k_dim * 4, 4)
        assert (k == x[seq].k).all()
        assert (v == x[seq].v).all()
        views.append(k)
    batched = np.concatenate(views, axis=1)  # [seq, batch * n_kv_heads, head_dim]
    assert batched.shape == (9, 2 * SPEC.n_kv_heads, SPEC.k_dim)
    assert (batched[:, SPEC.n_kv_heads :] == x[1].k).all()


@pytest.mark.requirement(2)
@pytest.mark.usefixtures("backend")
def test_the_repeated_layout_equals_repeat_and_transpose_at_every_step() -> None:
    """Batch 2, 2 KV heads, group 3, 4 tokens, dim 5: [batch * n_heads, seq, dim] against a canonical cache."""
    canonical = cache_of("contiguous", layout="token-major", max_seqs=2)
    repeated = cache_of("repeated", max_seqs=2)
    x = {seq: inputs(SPEC, 4, seed=seq) for seq in (0, 1)}
    for cache in (canonical, repeated):
        cache.open(0)
        cache.open(1)
    for t in range(4):
        sides = []
        for cache in (canonical, repeated):
            for seq in (0, 1):
                write_step(cache, x[seq].k[t : t + 1], x[seq].v[t : t + 1], seq)
            views = [history(cache.stores[0], cache.placements[0].blocks(seq)[0][0], t + 1) for seq in (0, 1)]
            sides.append([np.stack([view[i] for view in views]) for i in (0, 1)])  # [batch, seq, heads, dim]
        for plain, wide in zip(*sides, strict=True):
            expected = np.repeat(plain, 3, axis=2).transpose(0, 2, 1, 3).reshape(2 * 6, t + 1, 5)
            assert (wide.transpose(0, 2, 1, 3).reshape(2 * 6, t + 1, 5) == expected).all()


@pytest.mark.requirement(2)
def test_the_repeated_layout_needs_grouped_heads_and_the_plain_repeat_does_not() -> None:
    with pytest.raises(KvarnError, match="nothing to repeat"):
        cache_of("repeated", spec=LayerSpec(4, 4, 8, 8), place=Reference())
    x = np.arange(2 * 4 * 3).reshape(2, 4, 3)
    assert repeat_heads(x, 1) is x
    assert (repeat_heads(x, 2)[:, [0, 2, 4, 6]] == x).all()
    assert (repeat_heads(x, 2)[:, [1, 3, 5, 7]] == x).all()


@pytest.mark.requirement(9)
@pytest.mark.usefixtures("backend")
def test_index_of_a_cell_inside_a_head_major_slab() -> None:
    cache = cache_of("head-major", context=64, layers=2)
    x = inputs(SPEC, 20, seed=5)
    cache.open(0)
    write_step(cache, x.k, x.v)
    for layer in range(2):
        at = cache.plan.offsets[layer]
        k, v = (cache.arena[offset:].view(np.float32) for offset in (at.k, at.v))
        for head in range(2):
            for pos in range(20):
                index = head * 64 * 5 + pos * 5
                assert (k[index : index + 5] == x.k[pos, head]).all()
                assert (v[index : index + 5] == x.v[pos, head]).all()


@pytest.mark.requirement(7)
@pytest.mark.parametrize("layout", ["token-major", "head-major", "repeated"])
def test_history_is_a_view_of_storage_for_every_length(layout: str) -> None:
    cache = cache_of("contiguous", 64, layout=layout, place=Reference())
    x = inputs(SPEC, 64, seed=2)
    cache.open(0)
    write_step(cache, x.k, x.v)
    (block, _), at = cache.placements[0].blocks(0)[0], cache.plan.offsets[0]
    for length in range(1, 65):
        for view, offset in zip(history(cache.stores[0], block, length), (at.k, at.v), strict=True):
            assert view.ctypes.data == cache.arena.ctypes.data + offset
            assert view.shape[0] == length
            assert np.shares_memory(view, cache.arena)
    assert cache.counters.copied == 0


@pytest.mark.requirement(8)
def test_byte_offsets_of_every_layer() -> None:
    wide = plan(CacheConfig([LayerSpec(40, 40, 128, 128)] * 40, context=4096, strategy="head-major", codec="f32"))
    for layer, at in enumerate(wide.offsets):
        assert at.k == layer * 167_772_160
        assert at.v == at.k + 83_886_080
    assert wide.nbytes == 6_710_886_400
    half = plan(CacheConfig([LayerSpec(32, 32, 128, 128)] * 40, context=4096, strategy="head-major", codec="bf16"))
    assert half.nbytes == 2_684_354_560
    phi4 = plan(CacheConfig([LayerSpec(40, 10, 128, 128)] * 40, context=4096, strategy="head-major", codec="f32"))
    assert phi4.nbytes * 4 == wide.nbytes


@pytest.mark.requirement(51)
def test_every_layer_is_bound_at_its_own_offset() -> None:
    cache = Driven(CacheConfig([SPEC] * 4, 64, "paged", "int8"), Reference())
    addresses = [a.ctypes.data for s in cache.stores for a in (s.k, s.v, s.k_scale, s.v_scale)]
    offsets = [o for at in cache.plan.offsets for o in (at.k, at.v, at.k_scale, at.v_scale)]
    assert [a - cache.arena.ctypes.data for a in addresses] == offsets
    assert len(set(offsets)) == 16


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_strides_of_a_layout_name_every_unit_of_a_block_once(name: str) -> None:
    layout = LAYOUTS[name]
    for block_size, units in itertools.product((32, 64), (5, 1)):  # of cells, and of scales
        shape = BlockShape(layout.stored_heads(SPEC), units, block_size, layout.panel_size(block_size))
        axes = (2, shape.n_panels, shape.heads, shape.panel_size, shape.units)  # two blocks
        for strides in (layout.k_strides(shape), layout.v_strides(shape)):
            found = [sum(a * b for a, b in zip(cell, strides, strict=True)) for cell in np.ndindex(axes)]
            assert sorted(found) == list(range(2 * shape.total))
