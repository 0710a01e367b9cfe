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
from kvarn.backends.cuda.planes import KINDS, Planes
from kvarn.backends.cuda.products import Products
from kvarn.backends.cuda.specs import COLUMNS, HEAD_DIMS, ROWS, SPLIT, TYPE_BYTES, TYPES
from kvarn.backends.cuda.tiling import tiles
from kvarn.backends.cuda.weights import Matrix
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec

DEPTHS = (512, 2048)  # of the products: one split, and several
TOKENS = SPLIT + 40  # of attention: more than one split


def is_exact(driver: Device) -> bool:
    random = np.random.default_rng(1)
    for depth in DEPTHS:
        for planes in KINDS:
            if not _products_agree(driver, _packed(driver, planes, depth, random), random):
                return False
        for form in TYPES:
            if not _products_agree(driver, _plain(driver, form, depth, random), random):
                return False
    plain = [(codec, dim) for codec in ("f16", "bf16") for dim in HEAD_DIMS]
    coded = [(codec, dim) for codec in ("int8", "int4", "int8/int6") for dim in HEAD_DIMS]
    return all(_attention_agrees(driver, codec, dim, random) for codec, dim in plain + coded)


def _plain(driver: Device, form: str, depth: int, random: np.random.Generator) -> Matrix:
    weight = Allocation(driver, COLUMNS * depth * TYPE_BYTES[form])
    driver.upload(weight.address, _in_form(random.standard_normal((COLUMNS, depth), np.float32), form))
    return Matrix(form, weight, COLUMNS, depth)


def _packed(driver: Device, planes: Planes, depth: int, random: np.random.Generator) -> Matrix:
    """Any codes, and scales and offsets for weights of about one."""
    units = planes.units(depth)
    matrix = Matrix("f16", Allocation(driver, COLUMNS * planes.row_bytes(depth)), COLUMNS, depth, planes, units)
    driver.upload(matrix.address, random.integers(0, 256, planes.code_bytes(COLUMNS, depth), np.uint8))
    scales = random.uniform(1 << 13, 1 << 14, (units, planes.words, COLUMNS, 2)).astype(np.float16)
    if planes.offsets:
        scales[..., 1] = -random.uniform(0, 1, scales.shape[:-1])
    driver.upload(matrix.headers, scales)
    return matrix


def _products_agree(driver: Device, matrix: Matrix, random: np.random.Generator) -> bool:
    """The rows of every tile."""
    x, products = Allocation(driver, ROWS * matrix.depth * TYPE_BYTES[matrix.form]), Products(driver)
    driver.upload(x.address, _in_form(random.standard_normal((ROWS, matrix.depth), np.float32), matrix.form))
    products.reserve([matrix])
    found = []
    for tile, mode in tiles(matrix.kind):
        if mode == "whole" and matrix.splits > 1:
            continue
        out = np.empty((tile.rows, COLUMNS), np.float32)
        results = Allocation(driver, out.nbytes)
        products.launch(x.address, matrix, results.address, COLUMNS, tile.rows, tiled=(tile, mode))
        driver.download(results.address, out)
        found.append(out)
    most = max(found, key=len)
    return all(_same(most[: len(each)], each) for each in found)


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
