"""Short measurements of the kernels: what a product and attention take on this machine, with these threads.

Each trial builds a native program around the one operation that it times, over zeros: the time of our
kernels does not depend on the numbers. A trial of one row reads more bytes than the processor caches, because
a decode step reads every weight once. Trials take some 50 ms each, and report the best of a few runs: other
load on the machine only adds.
Non-goals: keeping results (forecast/machine.py); what a model needs (forecast/work.py).
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvarn import native
from kvarn.backends.cpu.memory import CpuKernels, CpuMemory
from kvarn.backends.host import HostMemory
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec, ceil_div
from kvarn.cache.step import Step

LEAST_COLD, MOST_COLD = 64 << 20, 512 << 20  # bytes that are read once in a trial of one row
TIMES_CACHED = 4  # the largest cache; with twice its size, a tenth is still found there
MANY = 256  # rows of a product that is bound by arithmetic
SHAPE = 2048, 2048  # rows and columns of the matrices that are read
MANY_SHAPE = 512, 2048  # and of those that are multiplied with many rows
FEW, KEYS = 16, 1024  # in the cache, before the tokens of an attention trial
MOST_LAYERS = 256
PAIRS = 64  # small products, each with a norm before it
SMALL = 64, 512  # their rows and columns
REPEATS = 5
LEAST_SECONDS = 0.05  # of all runs: threads that begin on one processor need some milliseconds to part
STORED = {  # a type of each packed kind that files do not name
    "table, i8 per 16": "IQ2_XS",
    "table, i8 per 32": "IQ4_XS",
    "table, f32 per 32": "IQ4_NL",
}


def cold_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """So many that reading them again finds almost none in the processor's caches."""
    cached = 0
    for path in folder.glob("index*/size"):
        with suppress(OSError, ValueError):
            cached = max(cached, int(path.read_text().strip().removesuffix("K")) << 10)
    return min(max(TIMES_CACHED * cached, LEAST_COLD), MOST_COLD)


def read_memory(pool: native.Pool) -> float:
    """Seconds per byte of reading, as fast as it goes."""
    return 1e-9 / native.read_bandwidth(cold_bytes(), pool.size)


def read_product(pool: native.Pool, kind: str) -> float:
    """Seconds per byte of weights of this kind that one row is multiplied with, in products of a usual size: at the
    end of each, threads wait for each other. What a product takes besides is not counted (`small_product`)."""
    n = ceil_div(cold_bytes(), native.outline(STORED.get(kind, kind), *SHAPE).nbytes)
    matrices = [_matrix(kind, *SHAPE) for _ in range(n)]
    seconds = _best(_products(pool, [[matrix] for matrix in matrices]), 1)
    return max(seconds - n * small_product(pool), seconds / 2) / sum(matrix.nbytes for matrix in matrices)


def multiply(pool: native.Pool, kind: str) -> float:
    """Seconds per multiplication of a product of many rows."""
    matrix = _matrix(kind, *MANY_SHAPE)
    program = _products(pool, [[matrix] * 2])
    return _best(program, MANY) / (2 * matrix.rows * matrix.cols * MANY)


def small_product(pool: native.Pool) -> float:
    """Seconds of a product that has almost nothing to read, and of the norm before it."""
    matrices = [_matrix("Q8_0", *SMALL) for _ in range(PAIRS)]
    return _best(_products(pool, [[matrix] for matrix in matrices]), 1) / PAIRS


def decode_attention(pool: native.Pool, spec: LayerSpec, codec: str, layout: str) -> tuple[float, float]:
    """Seconds of a layer's attention in a decode step: with almost no keys, and for every byte of cells it reads."""
    one = plan(_config([spec], codec, layout)).nbytes
    layers = min(max(ceil_div(cold_bytes(), one), 1), MOST_LAYERS)
    memory, cache = _empty([spec] * layers, codec, layout)
    program = _attentions(pool, spec, layers)
    seconds, read = [], []
    for keys in (FEW, KEYS):
        _step(memory, cache, keys - cache.length(0))
        step = _step(memory, cache, 1)
        seconds.append(_best(program, 1, memory))
        read.append(memory.host.plan.read_bytes(step))
    per_byte = max(seconds[1] - seconds[0], 1e-9) / (read[1] - read[0])
    return max(seconds[0] - read[0] * per_byte, 1e-9) / layers, per_byte


def attend_many(pool: native.Pool, spec: LayerSpec, codec: str, layout: str) -> float:
    """Seconds per multiplication of the attention of many new tokens."""
    memory, cache = _empty([spec], codec, layout)
    _step(memory, cache, KEYS)
    _step(memory, cache, MANY)
    program = _attentions(pool, spec, 1)
    pairs = sum(range(KEYS + 1, KEYS + MANY + 1))  # a token sees those before it and itself
    return _best(program, MANY, memory) / (pairs * spec.n_heads * (spec.k_dim + spec.v_dim))


def _matrix(kind: str, rows: int, columns: int) -> native.PackedMatrix:
    return native.zeros(STORED.get(kind, kind), rows, columns)


def _products(pool: native.Pool, steps: Sequence[Sequence[native.PackedMatrix]]) -> native.Program:
    """A program whose products each read a normalized row; the matrices of one product read the same row."""
    program, width = native.Program(pool), steps[0][0].cols
    rows, rounded = program.buffer(width), program.buffer(width)
    ones = np.ones(width, np.float32)
    program.embed("embed", _matrix("F32", 16, width), rows, 1.0)
    for matrices in steps:
        forms = any(m.integer for m in matrices), any(m.kind == "BF16" for m in matrices)
        program.norm_round("norm", False, rows, rounded, ones, 1e-6, *forms)
        program.linear("product", False, False, [(m, None, program.buffer(m.rows), False) for m in matrices])
    return _with_logits(program, rows, rounded, width)


def _attentions(pool: native.Pool, spec: LayerSpec, layers: int) -> native.Program:
    program = native.Program(pool)
    widths = [heads * spec.k_dim for heads in (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads, spec.n_heads)]
    q, k, v, out = (program.buffer(width) for width in widths)
    for buffer, width in zip((q, k, v), widths, strict=False):
        program.embed("embed", _matrix("F32", 16, width), buffer, 1.0)
    shape = spec.n_heads, spec.n_kv_heads, spec.k_dim
    for layer in range(layers):
        program.attention("attention", layer, q, k, v, out, 1.0, -1, shape, None, None, None, 0.0)
    return _with_logits(program, q, out, widths[0])


def _with_logits(program: native.Program, rows: int, rounded: int, width: int) -> native.Program:
    """A program ends with the logits of the wanted rows; these are too few to take time."""
    program.norm_round("round", True, rows, rounded, None, 0.0, False, False)
    program.linear("logits", True, True, [(_matrix("F32", 16, width), None, -1, False)])
    return program


def _config(specs: Sequence[LayerSpec], codec: str, layout: str) -> CacheConfig:
    context = KEYS + MANY
    return CacheConfig(specs, context, "paged", codec, layout, max_chunk=context)


def _empty(specs: Sequence[LayerSpec], codec: str, layout: str) -> tuple[CpuMemory, KVCache]:
    """A cache with one sequence. Its bytes are written, so that they are real memory."""
    planned = plan(_config(specs, codec, layout))
    host = HostMemory(planned, CpuKernels(native.Pool(1)), native.arena)
    host.arena[:] = 0
    cache = KVCache(planned)
    cache.open(0)
    return CpuMemory(host), cache


def _step(memory: CpuMemory, cache: KVCache, n: int) -> Step:
    """`n` more tokens. The memory is ready to run the step, any number of times."""
    cache.reserve(0, cache.length(0) + n)
    step = cache.prepare([0])
    memory.apply(step)
    cache.launched(step)
    cache.commit(0, range(n))
    return step


def _best(program: native.Program, tokens: int, memory: CpuMemory | None = None) -> float:
    """Seconds of a run."""
    view = native.CacheView() if memory is None else memory.view
    positions = np.arange(tokens, dtype=np.int32) if memory is None else memory.host.positions
    ids, wanted = np.zeros(tokens, np.int64), np.zeros(1, np.int64)
    logits = np.empty((1, 16), np.float32)
    found: list[float] = []
    while len(found) <= REPEATS or sum(found) < LEAST_SECONDS:
        start = time.perf_counter()
        program.run(view, ids, positions, wanted, logits)
        found.append(time.perf_counter() - start)
    return min(found[1:])  # the first grows the workspace
