"""The kernel `reduce` against NumPy in float64. What no split wrote is NaN, and so are the rows of other tokens."""

from dataclasses import replace

import numpy as np
import pytest
from gpu.support.driving import same_bits
from gpu.support.launching import FORMS, ROUNDOFF, Board, as_stored, decoded

from kvarn.backends.cuda import specs
from kvarn.backends.cuda.specs import Kernel

HEADS, TOKENS, SPARE = 3, [4, 0, 2], 8  # rows of `out`, and numbers behind each


class Splits:
    """[tokens, splits, heads] peaks and masses, and sums of `dim` numbers. `seen` are the splits with a key."""

    def __init__(self, n: int, dim: int, seen: np.ndarray) -> None:
        random = np.random.default_rng(n)
        shape = (len(TOKENS), n, HEADS)
        self.peaks = np.where(seen[None, :, None], random.uniform(-30, 30, shape), -np.inf).astype(np.float32)
        self.masses, self.sums = random.uniform(1, 9, shape), random.standard_normal((*shape, dim))
        self.masses[:, ~seen], self.sums[:, ~seen] = 0, np.nan

    def expected(self) -> np.ndarray:
        top = self.peaks.max(1, keepdims=True)
        scale = np.exp2((self.peaks - top).astype(np.float64))
        mass = np.nansum(self.masses * scale, 1)
        return np.nansum(self.sums * scale[..., None], 1) / mass[..., None]


def run(driver, kernel: Kernel, splits: Splits, form: str) -> np.ndarray:
    """[6, HEADS * dim + SPARE] in the form."""
    board, dim = Board(driver), splits.sums.shape[-1]
    padding = [(0, 0)] * 3 + [(0, specs.head_block(dim) - dim)]
    partial = np.pad(splits.sums, padding, constant_values=np.nan).transpose(0, 2, 1, 3)
    ends = np.stack([splits.peaks, splits.masses], -1).transpose(0, 2, 1, 3)
    given = [board.put(np.ascontiguousarray(x, np.float32)) for x in (partial, ends)]
    stride = HEADS * dim + SPARE
    out = board.room(6 * stride * specs.TYPE_BYTES[form])
    shape = (splits.peaks.shape[1], HEADS, dim, dim, stride, specs.FORM_CODES[form], 0, specs.head_block(dim))
    grid = (len(TOKENS), HEADS, specs.head_block(dim) // kernel.size("PIECE"))
    board.launch(kernel, grid, *given, board.put(np.array(TOKENS, np.int32)), out, *shape)
    return board.get(out, (6, stride), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dim", [8, 64, 96, 256])
@pytest.mark.parametrize(("n", "deep"), [(1, False), (3, False), (8, False), (41, False), (3, True), (75, True)])
def test_every_form_and_number_of_splits(driver, form: str, dim: int, n: int, deep: bool) -> None:
    """One split more than there is room for at a time, and splits without a key between others."""
    seen = np.arange(n) % 3 != 1
    splits = Splits(n, dim, seen)
    found = decoded(run(driver, specs.reduce(deep), splits, form), form)
    expected = splits.expected().reshape(len(TOKENS), -1)
    error = np.abs(found[TOKENS, : HEADS * dim] - expected).max() / np.abs(expected).max()
    assert error < ROUNDOFF[form] + 2e-6
    assert np.isnan(np.delete(found, TOKENS, 0)).all(), "rows of other tokens"
    assert np.isnan(found[:, HEADS * dim :]).all(), "behind a row"


def test_rounding_to_a_form_is_the_last_step(driver) -> None:
    splits = Splits(5, 64, np.ones(5, bool))
    wide = run(driver, specs.reduce(False), splits, "f32")[TOKENS, : HEADS * 64]
    for form in ("f16", "bf16"):
        found = decoded(run(driver, specs.reduce(False), splits, form), form)[TOKENS, : HEADS * 64]
        assert (found == as_stored(wide, form)).all()


@pytest.mark.parametrize("n", [8, 19, 41])
def test_loading_several_splits_at_a_time_changes_no_bit(driver, n: int) -> None:
    """Nor do splits without a key at the end, which a bucket adds."""
    kernel = specs.reduce(False)
    single = replace(kernel, constants=(("PIECE", 64), ("MANY", 1), specs.EARLY))
    splits = Splits(n, 64, np.ones(n, bool))
    found = run(driver, kernel, splits, "f32")[TOKENS, : HEADS * 64]
    assert same_bits(found, run(driver, single, splits, "f32")[TOKENS, : HEADS * 64])
    assert same_bits(found, run(driver, specs.reduce(True), splits, "f32")[TOKENS, : HEADS * 64])
    longer = Splits(n + 5, 64, np.arange(n + 5) < n)
    for name in ("peaks", "masses", "sums"):
        getattr(longer, name)[:, :n] = getattr(splits, name)
    assert same_bits(found, run(driver, kernel, longer, "f32")[TOKENS, : HEADS * 64])


def test_a_token_that_sees_nothing(driver) -> None:
    """As a row that pads a bucket: the others are as without it."""
    splits = Splits(9, 64, np.ones(9, bool))
    whole = run(driver, specs.reduce(False), splits, "f32")
    splits.peaks[1], splits.masses[1], splits.sums[1] = -np.inf, 0, np.nan
    found = run(driver, specs.reduce(False), splits, "f32")
    assert np.isnan(found[TOKENS[1]]).all()
    assert same_bits(found[[TOKENS[0], TOKENS[2]]], whole[[TOKENS[0], TOKENS[2]]]), "the spare numbers are equal too"


def test_a_split_with_nan_alone(driver) -> None:
    """It has no peak, but it was seen: the head is NaN."""
    splits = Splits(9, 64, np.ones(9, bool))
    splits.peaks[0, 3, 1], splits.masses[0, 3, 1], splits.sums[0, 3, 1] = -np.inf, np.nan, np.nan
    found = run(driver, specs.reduce(False), splits, "f32")[TOKENS, : HEADS * 64].reshape(3, HEADS, 64)
    assert np.isnan(found[0, 1]).all()
    assert np.isfinite(np.delete(found.reshape(-1, 64), 1, 0)).all()
