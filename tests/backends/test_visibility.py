"""What must not reach a row of attention: values it cannot see, keys that are missing, padding."""

import numpy as np
import pytest
from support.harness import Driven, backend, bits, chunks, drive, inputs, run
from support.pages import over_pages

from kvarn.backends.base import Counters
from kvarn.backends.host import Table
from kvarn.backends.reference import Reference
from kvarn.cache.codec import CODECS
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("codec", CODECS)
def test_a_value_that_is_not_finite_reaches_only_the_rows_that_see_it(codec: str, poison: float) -> None:
    """Position 10 is poisoned: rows before it, and rows whose window has passed it, are as if it did not exist."""
    spec = LayerSpec(2, 1, 8, 8, window=6)
    x = inputs(spec, 40, seed=0)
    clean, _ = run(CacheConfig([spec], 64, "paged", codec), chunks(0, 40))
    for which in ("k", "v"):
        dirty = inputs(spec, 40, seed=0)
        getattr(dirty, which)[10] = poison
        for sizes in ((40,), (8, 8, 8, 16), (1,) * 40):
            cache = Driven(CacheConfig([spec], 64, "paged", codec), backend())
            output = drive(cache, chunks(0, *sizes), {(0, 0): dirty})[0, 0]
            sees = np.isin(np.arange(40), np.arange(10, 16))
            assert (bits(output[~sees]) == bits(clean[0, 0][~sees])).all()
            assert not np.isfinite(output[sees]).all(axis=(1, 2)).any()
    assert np.isfinite(x.v).all()


def test_a_missing_visible_key_raises() -> None:
    """Tiles are skipped by visibility, never by residency: a table that lost a visible block is an error."""
    cache = Driven(CacheConfig([LayerSpec(2, 1, 8, 8)], 128, "paged", "f32"), Reference())
    x = inputs(LayerSpec(2, 1, 8, 8), 80, seed=0)
    drive(cache, chunks(0, 79), {(0, 0): x})
    cache.reserve(0, 80)
    cache.prepare([0])
    cache.tables[0].n_blocks[0] -= 1
    with pytest.raises(AssertionError, match="a visible key is missing"):
        cache.attend(0, x.q[79:])


@pytest.mark.usefixtures("backend")
def test_padding_is_neither_written_nor_read() -> None:
    k, v = np.full((2, 4, 16, 1, 8), 7, np.float32)
    counters = Counters()
    store = over_pages(k, v, CODECS["f32"], counters)
    table = Table(1, 1, 16)
    table.cells, table.q_start[1] = np.array([-1, 20, -1]), 3
    backend().kernels.write(np.zeros((3, 1, 8), np.float32), np.zeros((3, 1, 8), np.float32), store, table)
    assert counters.written == 2 * 8 * 4
    assert (k.reshape(64, 8)[20] == 0).all()
    assert (np.delete(k.reshape(64, 8), 20, axis=0) == 7).all()
