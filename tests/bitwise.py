"""Digests of everything that must be the same bits on every machine, printed as JSON.

    python tests/bitwise.py [--brief]

`--brief` leaves out what no library can change: native chunks, and other instruction sets. The digests are the same.
tests/test_machines.py runs this under other BLAS kernels, NumPy dispatch and C library variants and compares the
digests with tests/golden/bits.json. To make that file again: python tests/bitwise.py > tests/golden/bits.json
(only for a change of arithmetic that CHANGELOG announces).

Inputs are made of raw PCG64 bits and IEEE operations, so that they are the same everywhere, too.
"""

import json
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import numpy as np
from support import tiny_gguf
from support.harness import Driven, load_program, load_weights, score

from kvarn import native
from kvarn.backends.cpu import Cpu
from kvarn.backends.reference import Reference
from kvarn.backends.reference.program import ReferenceProgram
from kvarn.cache.codec import CODECS
from kvarn.cache.plan import CacheConfig
from kvarn.engine.params import TEXT_DEFAULTS, SamplingParams
from kvarn.engine.sampling import History, log_softmax, make_sampler
from kvarn.graph.ops import Llama3Scaling, Rope, YarnScaling
from kvarn.loading.checkpoint import Checkpoint, open_checkpoint
from kvarn.models.rope import frequencies, magnitude

CHUNKS = {"llama": (60, 7, 1), "gemma3": (60, 7, 1)}  # and every instruction set; the others' code is the same


class Draw:
    """Numbers of variance 1, a sum of three uniforms: no function of a library is asked."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def __call__(self, shape: tuple[int, ...]) -> np.ndarray:
        raw = self._bits.random_raw(3 * int(np.prod(shape))).reshape(3, *shape) >> np.uint64(40)
        uniform = raw.astype(np.float64) * 2.0**-24 - 0.5
        return (uniform[0] + uniform[1] + uniform[2]) * 2.0


def digest(*arrays: np.ndarray) -> str:
    hashed = sha256()
    for array in arrays:
        hashed.update(np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()[:16]


def logits(program, backend, variant: str, codec: str, chunk: int) -> np.ndarray:
    config = CacheConfig(program.config.layer_specs, 128, "paged", codec, block_size=32 if CODECS[codec].tail else 16)
    return score(program, Driven(config, backend), tiny_gguf.tokens(variant), 0, chunk)


def cells(program, backend, variant: str, codec: str) -> np.ndarray:
    """The cells of a sequence in canonical order: what snapshots and tiers keep."""
    block_size, length = (32, 32) if CODECS[codec].tail else (16, 48)  # whole blocks
    config = CacheConfig(program.config.layer_specs, 128, "paged", codec, block_size=block_size)
    driven, tokens = Driven(config, backend), tiny_gguf.tokens(variant)[:length]
    driven.open(0)
    driven.reserve(0, len(tokens))
    program.run(driven.memory, driven.book.prepare([0]), tokens, [])
    held = [(group, block) for group, p in enumerate(driven.book.placements) for block, _ in p.blocks(0)]
    return np.frombuffer(b"".join(driven.memory.read_block(*each) for each in held), np.uint8)


def kept(checkpoint: Checkpoint, slow: ReferenceProgram, pool: native.Pool, variant: str) -> dict[str, str]:
    """Cells of every codec."""
    found = {}
    for codec in CODECS:
        found[f"cells reference {variant} {codec}"] = digest(cells(slow, Reference(), variant, codec))
        for order in native.SUM_ORDERS:
            native.select_sum_order(order)
            on_cpu = cells(load_program(checkpoint, pool), Cpu(pool), variant, codec)
            found[f"cells cpu {variant} {codec} {order}"] = digest(on_cpu)
    program = load_program(checkpoint, pool)
    for codec in ("int8", "int6", "int4"):  # attention over integers knows no order of sums
        runs = [logits(program, Cpu(pool), variant, codec, chunk) for chunk in CHUNKS[variant]]
        found[f"cpu {variant} {codec}"] = digest(same(runs))
    return found


def same(results: list[np.ndarray]) -> np.ndarray:
    assert all(digest(result) == digest(results[0]) for result in results), "bits depend on chunks or instruction sets"
    return results[0]


def models(folder: Path, brief: bool = False) -> dict[str, str]:
    found, pool = {}, native.Pool(1 if brief else 2)
    for variant in tiny_gguf.VARIANTS:
        path = tiny_gguf.write(folder / f"{variant}.gguf", variant, draw=Draw(len(variant)))
        checkpoint = open_checkpoint(path)
        slow = ReferenceProgram(checkpoint.config, load_weights(checkpoint), pool)
        chunks = CHUNKS.get(variant, (60, 16)) if not brief or variant == "llama" else (60,)
        runs = [logits(slow, Reference(), variant, "bf16", chunk) for chunk in chunks]
        found[f"reference {variant}"] = digest(same(runs))
        for order in native.SUM_ORDERS:
            native.select_sum_order(order)
            found[f"cpu {variant} {order}"] = digest(same(on_cpu(checkpoint, pool, variant, brief)))
        if variant in CHUNKS:
            found |= kept(checkpoint, slow, pool, variant)
    return found


def on_cpu(checkpoint: Checkpoint, pool: native.Pool, variant: str, brief: bool) -> list[np.ndarray]:
    program = load_program(checkpoint, pool)
    if brief:
        return [logits(program, Cpu(pool), variant, "bf16", 60)]
    runs = [logits(program, Cpu(pool), variant, "bf16", chunk) for chunk in CHUNKS.get(variant, (60,))]
    best = native.isa()
    for name in native.isas() if variant in CHUNKS else ():
        native.select_isa(name)
        runs.append(logits(load_program(checkpoint, pool), Cpu(pool), variant, "bf16", 60))
    native.select_isa(best)
    return runs


def sampling() -> dict[str, str]:
    """A vocabulary as large as real ones: library functions change their ways with an array's length."""
    draw, tokens, reports = Draw(5), [], []
    for i, size in enumerate((11, 1000, 49_152, 151_936)):
        rows = (draw((4, size)) * 4).astype(np.float32)
        for settings in (dict(top_p=0.9), dict(top_k=40, min_p=0.02), dict(frequency_penalty=0.5, top_p=0.99)):
            params = SamplingParams(temperature=1.1, seed=i, logprobs=3, **settings).with_defaults(TEXT_DEFAULTS)
            sample = make_sampler(params, i, size)
            for at, row in enumerate(rows):
                sampled = sample(row, History(list(range(5 + at)), 5), 0)
                tokens.append(sampled.token)
                reports += [sampled.logprob, *(p for _, p in sampled.top)]
        reports += log_softmax(rows)[:, : 7 + i].ravel().tolist()
    return {"sampled tokens": digest(np.array(tokens)), "log-probabilities": digest(np.array(reports))}


def ropes() -> dict[str, str]:
    scalings = (None, Llama3Scaling(8.0, 1.0, 4.0, 8192), YarnScaling(4.0, 4096))
    every = [Rope(base, dim, s) for base in (1e4, 1e5, 5e5, 1e6) for dim in (48, 64, 128, 256) for s in scalings]
    return {"rope": digest(*(frequencies(rope) * magnitude(rope) for rope in every))}


def main() -> None:
    a = np.ones((64, 64), np.float32)
    print("ready" if (a @ a)[0, 0] == 64 else "broken", file=sys.stderr, flush=True)  # NumPy's BLAS runs here
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(models(Path(folder), "--brief" in sys.argv[1:]) | sampling() | ropes(), indent=1))


if __name__ == "__main__":
    main()
