"""Storage on a device: offsets of 64 bits, and blocks as bytes that any layout can read."""

from pathlib import Path

import numpy as np
import pytest
from support.harness import Driven, assert_near, backend, bits, chunks, drive, expect, fill_with_nan, inputs

from kvarn.cache.cache import KVCache
from kvarn.cache.codec import CODECS
from kvarn.cache.layouts import LAYOUTS
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.step import Step
from kvarn.errors import BadArray

SPEC = LayerSpec(4, 2, 8, 8)


def moved_up(step: Step, by: int, block_size: int) -> Step:
    """The same step in blocks whose numbers are higher by so many."""
    (group,) = step.groups
    edits = [edit._replace(blocks=[block + by for block in edit.blocks]) for edit in group.edits]
    group = group._replace(edits=edits, cells=[cell + by * block_size for cell in group.cells])
    return step._replace(groups=(group,))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", ["token-major", "head-major", "panel", "columns", "repeated"])
def test_storage_past_two_to_the_31_elements(layout: str, codec: str, tmp_path: Path) -> None:
    """Offsets are 64 bits everywhere: a text in the highest blocks of a file of up to 17 GiB, of which few pages are
    ever touched, gives the bits that it gives in a small cache."""
    spec, x = LayerSpec(4, 2, 128, 128), inputs(LayerSpec(4, 2, 128, 128), 50, seed=0)
    heads = 4 if layout == "repeated" else 2
    far = (1 << 31) // (heads * 128) + 4096  # tokens
    settings = dict(strategy="paged", codec=codec, layout=layout, block_size=32, max_chunk=64)
    outputs = []
    for context in (64, far):
        config = CacheConfig([spec], context, **settings)
        large = Driven(config, backend(), lambda n: np.memmap(tmp_path / "arena", np.uint8, "w+", shape=n))  # sparse
        first = large.plan.n_blocks - 2
        book, rows = KVCache(plan(CacheConfig([spec], 64, **settings))), []  # of two blocks: the last two of the arena
        book.open(0)
        for start, stop in ((0, 40), (40, 41), (41, 50)):
            assert book.reserve(0, stop)
            step = book.prepare([0])
            large.memory.apply(moved_up(step, first, 32))
            large.write(0, x.k[start:stop], x.v[start:stop])
            rows.append(large.attend(0, x.q[start:stop]))
            book.launched(step)
            book.commit(0, range(start, stop))
        outputs.append(np.concatenate(rows))
    assert first * 32 * heads * 128 > 1 << 31
    assert (bits(outputs[0]) == bits(outputs[1])).all()
    assert_near(outputs[1], expect(x, spec, codec))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("codec", CODECS)
def test_a_block_as_bytes_is_the_same_in_every_layout(codec: str) -> None:
    """What one layout's cache computed goes on in another's, to the bit. A tail goes nowhere, so a tile ends there."""
    at = 32 if CODECS[codec].tail else 40
    x, (before, after) = inputs(SPEC, 45, seed=3), chunks(0, at, 45 - at)
    data = {(0, layer): inputs(SPEC, 45, seed=layer) for layer in range(2)} | {(0, 0): x}
    caches = {}
    for layout in LAYOUTS:
        config = CacheConfig([SPEC] * 2, 64, "paged", codec, layout=layout, block_size=32, max_chunk=64)
        caches[layout] = Driven(config, backend())
        fill_with_nan(caches[layout])
    whole = drive(caches["token-major"], [before, after], data)
    blocks = [block for block, first in caches["token-major"].placements[0].blocks(0) if first < at]
    held = [caches["token-major"].memory.read_block(0, block) for block in blocks]
    for layout, cache in caches.items():
        if layout == "token-major":
            continue
        cache.open(0)
        for start, length in ((0, at), (at, 45)):
            cache.reserve(0, length)
            cache.prepare([0])
            if start == 0:
                for (block, _), bytes_ in zip(cache.placements[0].blocks(0), held, strict=True):
                    cache.memory.write_block(0, block, bytes_)
                    assert cache.memory.read_block(0, block) == bytes_, layout
                cache.commit(0, range(at))
        for layer in range(2):
            one = data[0, layer]
            cache.write(layer, one.k[at:], one.v[at:])
            assert (bits(cache.attend(layer, one.q[at:])) == bits(whole[0, layer][at:])).all(), layout
        with pytest.raises(BadArray, match="bytes, not 3"):
            cache.memory.write_block(0, 0, b"abc")
