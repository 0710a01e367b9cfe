"""Attention over int8 cells, bit for bit: the definition in NumPy against every instruction set.

The definition is that of native/kernels/integers.hpp, without tiles of rows, layouts and threads. It is not the
oracle: how far integers are from exact attention is measured here too.
"""

import numpy as np
import pytest
from support.harness import Driven, Inputs, backend, bits, chunks, drive, fill_with_nan, inputs, using

from kvarn import native
from kvarn.backends.reference import dense
from kvarn.backends.reference.codecs import DEFINITIONS, rotate
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec

F = np.float32
LOG2E = F(1.4426950408889634)
CHUNK, TILE = 256, 32
COARSE = [9.58285e-3, 5.590643e-2, 2.4024099e-1, 6.931242e-1]
FINE = [
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
]


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """In f32, rounded once: the sum in float64 is rounded to odd, so that rounding it again changes nothing."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)  # exact
    addend = np.broadcast_to(np.asarray(c, np.float64), product.shape)
    s = product + addend
    t = s - product
    error = (product - (s - t)) + (addend - t)
    even = (s.view(np.int64) & 1) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where((error != 0) & even, np.nextafter(s, towards), s).astype(F)


def exp2(x: np.ndarray, coefficients: list[float]) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        n = np.rint(x)
        f = np.where(np.isfinite(x), x - n, F(0)).astype(F)
    p = np.full(x.shape, F(coefficients[0]))
    for each in [*coefficients[1:], 1.0]:
        p = fma(p, f, F(each))
    return np.where(x < -126, F(0), np.ldexp(p, np.where(np.isfinite(n), n, 0).astype(np.int32))).astype(F)


def codes_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[L, KV, dim] -> codes [KV, L, depth] and scales [KV, L]."""
    cells, scales = DEFINITIONS["int8"].define(np.ascontiguousarray(x.reshape(-1, x.shape[-1])))
    codes = cells.view(np.int8).reshape(*x.shape[:2], -1)
    return codes.swapaxes(0, 1).astype(np.int64), scales.reshape(x.shape[:2]).T


def reduce_add(lanes: np.ndarray) -> np.ndarray:
    for width in (8, 4, 2, 1):
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
    return lanes[..., 0]


def chunk(s: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> tuple[F, F, np.ndarray]:
    """(m, l, O) of one row over the keys of one chunk; s is -inf where a key is not visible."""
    n = len(s)
    s, scales = (np.pad(x, (0, -n % TILE), constant_values=fill) for x, fill in ((s, -np.inf), (scales, 0)))
    codes = np.pad(codes, ((0, -n % TILE), (0, 0)))
    m = s.max()
    p = exp2(s - (F(0) if np.isneginf(m) else m), COARSE)
    lanes, o = np.zeros(16, F), np.zeros(codes.shape[1], F)
    for part in p.reshape(-1, 16):
        lanes = lanes + part
    for start in range(0, len(s), TILE):
        tile = slice(start, start + TILE)
        w = p[tile] * scales[tile]
        step = w.max() / F(255)
        rounded = np.rint(w / step).astype(np.int64) if step > 0 else np.zeros(TILE, np.int64)
        o = fma((rounded @ codes[tile]).astype(F), np.full(o.shape, step), o)
    return m, reduce_add(lanes), o


def define(x: Inputs, spec: LayerSpec, scale: float) -> np.ndarray:
    dim, rows = x.q.shape[-1], len(x.q)
    (k, k_scale), (v, v_scale) = codes_of(x.k), codes_of(x.v)
    t = rotate(np.pad(x.q, ((0, 0), (0, 0), (0, -dim % 32)))) * (F(scale) * LOG2E * F(1 / 32))
    steps = np.abs(t).max(-1) / F(127)
    codes = np.rint(t / steps[..., None]).astype(np.int64)
    out = np.zeros(x.q.shape, F)
    for row in range(rows):
        seen = spec.visible(row, np.arange(rows))
        for head in range(spec.n_heads):
            kv = head // spec.group
            s = (k[kv] @ codes[row, head]).astype(F) * (k_scale[kv] * steps[row, head])
            s = np.where(seen, s, F(-np.inf))
            m, total, o = F(-np.inf), F(0), np.zeros(k.shape[-1], F)
            for start in range(0, row + 1, CHUNK):
                keys = slice(start, min(start + CHUNK, row + 1))
                if not seen[keys].any():
                    continue
                fresh, more, part = chunk(s[keys], v[kv, keys], v_scale[kv, keys])
                top = max(m, fresh)
                a, b = exp2(np.array([m - top, fresh - top], F), FINE)
                m, total, o = top, fma(total, a, more * b), fma(o, np.full(o.shape, a), part * b)
            out[row, head] = (rotate(o / total) * F(1 / 32))[:dim]
    return out


def attend(x: Inputs, spec: LayerSpec, sizes: tuple[int, ...], layout: str) -> np.ndarray:
    config = CacheConfig([spec], len(x.q), "paged", "int8", layout, 32, max_chunk=max(sizes))
    cache = Driven(config, backend())
    fill_with_nan(cache)
    return drive(cache, chunks(0, *sizes), {(0, 0): x})[0, 0]


CASES = {
    "head of 64": (LayerSpec(3, 1, 64, 64), 70),
    "padded head": (LayerSpec(4, 2, 48, 48), 66),
    "head of 5": (LayerSpec(2, 2, 5, 5), 40),
    "several chunks": (LayerSpec(2, 1, 32, 32), 530),
    "window and pinned tokens": (LayerSpec(2, 1, 32, 32, window=40, pinned=3), 300),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Inputs, LayerSpec, np.ndarray]:
    spec, length = CASES[request.param]
    x = inputs(spec, length, seed=length)
    return x, spec, define(x, spec, spec.k_dim**-0.5)


@pytest.mark.parametrize("name", native.isas())
def test_every_instruction_set_computes_the_definition(case: tuple[Inputs, LayerSpec, np.ndarray], name: str) -> None:
    """In prefill and decode, with K and V transposed or not."""
    x, spec, expected = case
    n = len(x.q)
    for layout, sizes in (("columns", (n,)), ("panel", (n - 2, 1, 1)), ("token-major", (1, n - 2, 1))):
        with using(name):
            assert (bits(attend(x, spec, sizes, layout)) == bits(expected)).all(), layout


def test_integers_are_near_exact_attention(case: tuple[Inputs, LayerSpec, np.ndarray]) -> None:
    """Measured: 0.6 to 1.2 % of the outputs' size, of cells, queries and probabilities together."""
    x, spec, found = case
    exact = dense.attend(x.q, x.k, x.v, spec, spec.k_dim**-0.5)
    assert np.sqrt(np.square(found - exact).mean()) < 0.02 * np.sqrt(np.square(exact).mean())
