"""Equal bits: a row has the same bits whatever the cache, the chunks and the rows beside it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gpu.support.blocks import blocks
from gpu.support.driving import Driven, Floats, same_bits, workload
from gpu.support.launching import FORMS, Board
from gpu.support.models import Batch, Loaded, text
from support.tiny_models import ARCHITECTURES

from kvarn.backends.cuda.planes import PACKED
from kvarn.cache.codec import codecs_of
from kvarn.cache.plan import SMALLEST_BLOCK, CacheConfig
from kvarn.cache.spec import LayerSpec
from proof.conformance import gqa
from proof.models import PACKED as PACKED_MODELS
from proof.models import TYPES, write
from proof.report import Check, Report
from proof.requests import under_pressure
from proof.site import Site

CACHES: list[dict[str, Any]] = [
    dict(strategy="paged", block_size=16),
    dict(strategy="paged", block_size=64, layout="token-major"),
    dict(strategy="contiguous"),
    dict(strategy="contiguous", layout="token-major", block_size=32),
    dict(strategy="head-major"),
    dict(strategy="repeated"),
    dict(strategy="ring", block_size=16),
    dict(strategy="sliding", block_size=32),
    dict(strategy="sinks", block_size=16, pinned=0),
]
CODECS = {"F32": "f32", "F16": "f16"}  # of the cells that go with stored types; the others have bf16


def run(site: Site, report: Report) -> None:
    _products(site, report)
    _attention(site, report)
    every = [(architecture, type_name) for architecture in ARCHITECTURES for type_name in TYPES]
    quick = [*every[::7], *PACKED_MODELS[:2]]
    for architecture, type_name in site.pick([*every, *PACKED_MODELS], quick, every[::7], every[:1]):
        loaded = Loaded(write(site, architecture, type_name), site.backend)
        codec = CODECS.get(type_name, "bf16")
        with report.check(f"{architecture} {type_name}: chunks, caches") as check:
            chunks_and_caches(site, check, loaded, codec)
        with report.check(f"{architecture} {type_name}: batches") as check:
            batches(site, check, loaded, codec)
        with report.check(f"{architecture} {type_name}: engine") as check:
            under_pressure(site, check, loaded, codec)


def _products(site: Site, report: Report) -> None:
    """The rows of a large product, alone, in every number and in another place."""
    full = [(4096, 4096), (4096, 14336), (12288, 4096), (2560, 2048), (1000, 576)]  # 4, 4, 1, 2 and 1 splits
    shapes = site.pick(full, [(512, 2304)], [(40, 2304)], [(40, 64)])
    packed = site.pick([*full[:-1], (16384, 2048), (1000, 768)], [(512, 2304)], [(40, 2304)], [(40, 256)])
    counts = site.pick((1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257), (1, 2, 17, 65, 200), (1, 17), (1,))
    largest = site.pick(400, 300, 20, 3)
    for kind in (*FORMS, *PACKED):
        with report.check(f"products {kind}") as check:
            for shape in shapes if kind in FORMS else packed:
                board, random = Board(site.driver), site.random(21)
                if kind in FORMS:
                    matrix = board.matrix(kind, random.standard_normal(shape, np.float32))
                else:
                    matrix, _ = board.packed(kind, blocks(kind, shape, random), shape[1])
                x = random.standard_normal((largest, shape[1]), np.float32)
                whole = board.linear(matrix, x)
                for n in counts:
                    check.case(same_bits(board.linear(matrix, x[:n]), whole[:n]), f"{shape}, {n} of {largest} rows")
                order = random.permutation(largest)
                check.case(same_bits(board.linear(matrix, x[order]), whole[order]), f"{shape}, rows in another order")


def _attention(site: Site, report: Report) -> None:
    """Layers without a model, by chunks and in every cache."""
    dims = site.pick((64, 96, 128, 256), (64, 256), (64,), (8,))
    length = site.pick(600, 300, 70, 20)
    chunks: dict[int | None, tuple[int, ...]] = {None: (length, *site.pick((1, 7, 64, 512), (7,), (7,)))}
    if site.size in ("full", "tiny"):
        chunks[site.pick(100, 100, 20)] = (length, 7)
    for codec in site.pick(FORMS, FORMS, ("bf16", "f32"), ("bf16",)):
        with report.check(f"attention {codec}") as check:
            for dim in dims:
                for window in chunks:
                    _one_attention(site, check, gqa(4, 2, dim, window), codec, length, chunks[window])


def _one_attention(site: Site, check: Check, spec: LayerSpec, codec: str, length: int, chunks: Sequence[int]) -> None:
    data = workload([spec], [{0: length}])
    expected: Floats | None = None
    for chunk in chunks:
        sizes = [chunk] * (length // chunk) + ([length % chunk] if length % chunk else [])
        for cache in caches(site, chunk == length, codec):
            settings = dict(context=length, codec=codec, max_chunk=length, window=spec.window) | cache
            found = Driven(site.backend, CacheConfig([spec], **settings)).run([{0: n} for n in sizes], data)[0, 0]
            expected = found if expected is None else expected
            what = f"heads of {spec.k_dim}, window {spec.window}, chunks of {chunk}, {cache}"
            check.case(same_bits(found, expected), what)


def caches(site: Site, every: bool, codec: str) -> list[dict[str, Any]]:
    found = site.pick(CACHES, CACHES[::3], [CACHES[0], CACHES[8]], CACHES[:2])
    least = least_block(codec)
    sized = [each | {"block_size": max(each["block_size"], least)} if "block_size" in each else each for each in found]
    return sized if every else sized[:1]


def least_block(codec: str) -> int:
    """The smallest block that cells of a codec may have."""
    return max(codecs_of(codec).tail, SMALLEST_BLOCK)


def chunks_and_caches(site: Site, check: Check, loaded: Loaded, codec: str) -> None:
    """All logits of a text, in chunks and in every cache."""
    n = site.pick(600, 290, 30, 12)
    tokens = text(n)
    expected = loaded.logits(tokens, n, codec=codec)
    check.case(bool(np.isfinite(expected).all()), "a logit is not finite")
    chunks: Sequence[int] = site.pick((1, 7, 64, 512), (7, 64), (7,), (5,))
    for chunk in chunks:
        check.case(same_bits(loaded.logits(tokens, chunk, codec=codec), expected), f"chunks of {chunk}")
    for cache in caches(site, True, codec):
        settings = {"codec": codec} | cache
        found = loaded.logits(tokens, site.pick(64, 64, 20), **settings)
        check.case(same_bits(found, expected), f"{cache}")


def batches(site: Site, check: Check, loaded: Loaded, codec: str) -> None:
    """Sequences of different lengths that decode together, in any place of the batch and from graphs, against each
    alone in one chunk."""
    sizes: Sequence[int] = site.pick((1, 2, 3, 7, 32, 128), (3, 7), (3,), (2,))
    lengths = site.random(31).integers(1, site.pick(600, 280, 20, 6), max(sizes)).tolist()
    lengths[0] = site.pick(560, 270, 18, 5)
    n_new, context = 3, max(lengths) + 8
    texts = [text(length + n_new, seed) for seed, length in enumerate(lengths)]
    alone = []
    for tokens in texts[: min(max(sizes), site.pick(12, 4, 3))]:
        alone.append(loaded.logits(tokens, len(tokens), len(tokens) - n_new - 1, codec=codec))
    for size in sizes:
        for turned in (False, True) if size > 1 else (False,):
            order = list(range(size))[:: -1 if turned else 1]
            batch = Batch(loaded, context, size, codec=codec)
            found: dict[int, list[Floats]] = {seq: [] for seq in order}
            for some in (order[::3], order[1::3], order[2::3]):  # prompts of several sequences in a step
                if some:
                    rows = batch.step({seq: texts[seq][: lengths[seq]] for seq in some})
                    for seq in some:
                        found[seq].append(rows[seq])
            replayed = loaded.program.graphs.replayed
            for i in range(n_new):
                rows = batch.step({seq: [texts[seq][lengths[seq] + i]] for seq in order})
                for seq in order:
                    found[seq].append(rows[seq])
            replayed = loaded.program.graphs.replayed - replayed
            check.case(replayed >= n_new - 1, f"batch of {size}: {replayed} steps were replayed")  # one may be timed
            for seq in order:
                if seq < len(alone):
                    ours = np.concatenate(found[seq])
                    check.case(same_bits(ours, alone[seq]), f"batch of {size}, sequence {seq}, turned {turned}")
