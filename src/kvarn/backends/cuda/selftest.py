"""Whether this device computes a row with the same bits whatever the shape of its tile.

NVIDIA does not promise it. It was seen on the devices that docs/gpu.md lists, for sums that run through
one accumulator in order. So the backend tries it when it opens: products of every tile and split, and attention
token by token against attention in one step. If bits differ, the backend says `exact: no` and works.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvarn.arrays import Floats
from kvarn.backends.cuda.buffers import Allocation
from kvarn.backends.cuda.driver import Device
from kvarn.backends.cuda.layers import CudaLayers
from kvarn.backends.cuda.memory import CudaMemory
from kvarn.backends.cuda.products import Products
from kvarn.backends.cuda.specs import COLUMNS, HEAD_DIMS, LEAST_SPLIT, ROWS, SPLIT, TYPE_BYTES, TYPES, tiles
from kvarn.backends.cuda.weights import Matrix
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec

DEPTHS = (512, 2 * LEAST_SPLIT)  # of the products: one split, and two
TOKENS = SPLIT + 40  # of attention: more than one split


def is_exact(driver: Device) -> bool:
    random = np.random.default_rng(1)
    for form in TYPES:
        if not _products_agree(driver, form, random):
            return False
        if form != "f32" and not all(_attention_agrees(driver, form, dim, random) for dim in HEAD_DIMS):
            return False
    return True


def _products_agree(driver: Device, form: str, random: np.random.Generator) -> bool:
    """Every tile, with one split of the depth and with several."""
    for depth in DEPTHS:
        x, weight = (Allocation(driver, rows * depth * TYPE_BYTES[form]) for rows in (ROWS, COLUMNS))
        for memory, rows in ((x, ROWS), (weight, COLUMNS)):
            driver.upload(memory.address, _in_form(random.standard_normal((rows, depth), np.float32), form))
        matrix, products = Matrix(form, weight, COLUMNS, depth), Products(driver)
        products.reserve([matrix])
        found = []
        for tile, mode in tiles(form):
            if mode == "whole" and matrix.splits > 1:
                continue
            out = np.empty((tile.rows, COLUMNS), np.float32)
            results = Allocation(driver, out.nbytes)
            products.launch(x.address, matrix, results.address, COLUMNS, tile.rows, tiled=(tile, mode))
            driver.download(results.address, out)
            found.append(out)
        if not all(_same(found[-1][: len(each)], each) for each in found):
            return False
    return True


def _attention_agrees(driver: Device, codec: str, dim: int, random: np.random.Generator) -> bool:
    """The last tokens one by one, and all tokens in one step."""
    spec = LayerSpec(4, 1, dim, dim)
    q, k, v = (random.standard_normal((TOKENS, heads, dim), np.float32) for heads in (4, 1, 1))
    found = []
    for alone in (0, 3):
        planned = plan(CacheConfig([spec], TOKENS, "paged", codec, "head-major", max_chunk=TOKENS))
        cache, layers = KVCache(planned), CudaLayers(CudaMemory(driver, planned))
        cache.open(0)
        edges = [0, *range(TOKENS - alone, TOKENS), TOKENS]
        for start, stop in pairwise(edges):
            if start < stop:
                found_now = _attend(cache, layers, q, k, v, start, stop)
        found.append(found_now[-1])
    return _same(*found)


def _attend(cache: KVCache, layers: CudaLayers, q: Floats, k: Floats, v: Floats, start: int, stop: int) -> Floats:
    cache.reserve(0, stop)
    layers.apply(cache.prepare([0]))
    layers.write(0, *(np.ascontiguousarray(x[start:stop]) for x in (k, v)))
    cache.advance(0, stop - start)
    cache.commit(0, range(start, stop))
    return layers.attend(0, np.ascontiguousarray(q[start:stop]))


def _in_form(x: Floats, form: str) -> NDArray[np.uint16] | Floats:
    if form == "f32":
        return x
    if form == "f16":
        return x.astype(np.float16).view(np.uint16)
    return np.ascontiguousarray(x.view(np.uint16).reshape(*x.shape, 2)[..., 1])  # cut off, not rounded


def _same(a: Floats, b: Floats) -> bool:
    return bool((a.view(np.uint32) == b.view(np.uint32)).all())
