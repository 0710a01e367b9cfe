"""Measures attention over each codec of cells, relative to bf16: one layer, and a whole model.

One layer has random numbers and one thread. A model has its own engine and cache for each codec, and one set of
weights. Codecs are measured in turn, a few tokens at a time; the ratio is the median over the turns. The instruction
set is the best, or that of KVARN_ISA.

    python bench/cells.py [--heads 9/3 --dim 64] [--keys 4095] [--codecs bf16,int8,int4]
    python bench/cells.py --model smollm2 [--depths 4200,8000] [--rounds 60] [--prefill 4096] [--json FILE]
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvarn import LLM, native
from kvarn.backends.cpu import Cpu
from kvarn.backends.cpu.memory import _view
from kvarn.bench.case import GENERATE, PROMPT, Case
from kvarn.bench.ids import RandomIds
from kvarn.bench.machine import cpu_name
from kvarn.bench.subject import EngineSubject, Setup, build
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec

CHUNK = 512
STEPS = 4  # of decode in a turn
COPIES = {"fits the caches": 1, "from memory": 24}


class Layer:
    """Layers of equal content and codec, each with so many keys before this step's tokens."""

    def __init__(self, pool: native.Pool, spec: LayerSpec, codec: str, keys: int, new: int, layers: int) -> None:
        backend = Cpu(pool)
        planned = plan(
            CacheConfig([spec] * layers, keys + new, "paged", codec, max_chunk=CHUNK), backend.default_layout
        )
        cache, self.memory = KVCache(planned), backend.layers(planned)
        rng = np.random.default_rng(1)
        cache.open(0)
        at = 0
        while at < keys + new:
            n = new if at == keys else min(CHUNK, keys - at)
            cache.reserve(0, at + n)
            step = cache.prepare([0])
            self.memory.apply(step)
            k, v = (rng.standard_normal((n, spec.n_kv_heads, spec.k_dim)).astype(np.float32) for _ in range(2))
            for layer in range(layers):
                self.memory.write(layer, k, v)
            at += n
            if at < keys + new:
                cache.advance(0, n)
                cache.commit(0, range(at - n, at))
        q = rng.standard_normal((new, spec.n_heads, spec.k_dim)).astype(np.float32)
        out, decode, fresh = np.zeros_like(q), new == 1, self.memory.kernels._fresh
        self.calls = [
            (pool, _view(store, self.memory.tables[0], spec), 0, q, out, spec.k_dim**-0.5, not decode, decode, fresh)
            for store in self.memory.stores
        ]

    def seconds(self) -> float:
        start = time.perf_counter()
        for arguments in self.calls:
            native.attend(*arguments)
        return (time.perf_counter() - start) / len(self.calls)


def interleaved(layers: dict[str, Layer], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {codec: [] for codec in layers}
    for _ in range(rounds):
        for codec, layer in layers.items():
            times[codec].append(layer.seconds())
    return {codec: statistics.median(each) for codec, each in times.items()}


def one_layer(codecs: list[str], spec: LayerSpec, keys: int, rounds: int) -> None:
    pool = native.Pool(1)
    print(f"one layer, {spec.n_heads}/{spec.n_kv_heads} heads of {spec.k_dim}, {keys} keys, {native.isa()}, one thread")
    print(f"{'':<24}" + "".join(f"{codec:>16}" for codec in codecs))
    for where, copies in COPIES.items():
        made = {codec: Layer(pool, spec, codec, keys, 1, copies) for codec in codecs}
        _print(f"decode, {where}", interleaved(made, max(5, rounds // copies)))
    made = {codec: Layer(pool, spec, codec, keys, CHUNK - 1, 1) for codec in codecs}
    _print(f"prefill of {CHUNK - 1}", interleaved(made, max(3, rounds // 20)))


def _print(what: str, found: dict[str, float]) -> None:
    base = next(iter(found.values()))
    cells = (f"{1e6 * seconds:9.0f} us {base / seconds:4.2f}" for seconds in found.values())
    print(f"{what:<24}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


def in_turn(subjects: dict[str, EngineSubject], case: Case, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each codec in each round. Every other round goes through them backwards."""
    found: dict[str, list[float]] = {codec: [] for codec in subjects}
    for subject in subjects.values():
        subject.prepare(case)
    for number in range(rounds):
        for codec in list(subjects)[:: 1 if number % 2 else -1]:
            reading = subjects[codec].measure(case)
            found[codec].append(reading.tokens / reading.seconds)
    return found


def whole_model(codecs: list[str], model: str, depths: list[int], rounds: int, prefill: int) -> dict[str, Any]:
    llm = LLM(model)
    cases = [Case(GENERATE, STEPS, depth) for depth in depths] + [Case(PROMPT, prefill)] * (prefill > 0)
    longest = max(case.depth + case.n for case in cases) + STEPS + 1
    ids = RandomIds(llm.config.vocab_size, longest)
    subjects = {
        codec: EngineSubject(build(llm, Setup(cache_type=codec), longest, 1), 1, ids, llm.program.nbytes)
        for codec in codecs
    }
    rows = []
    print(f"{model}, {native.isa()}, {cpu_name()}")
    print(f"{'':<24}" + "".join(f"{codec:>20}" for codec in codecs))
    for case in cases:
        found = in_turn(subjects, case, rounds if case.kind == GENERATE else max(3, rounds // 12))
        base = found[codecs[0]]
        row: dict[str, Any] = {"test": case.kind, "depth": case.depth, "tokens": case.n, "rounds": len(base)}
        for codec, speeds in found.items():
            ratios = [speed / other for speed, other in zip(speeds, base, strict=True)]
            row[codec] = {"tokens_per_s": statistics.median(speeds), "ratio": statistics.median(ratios)}
        rows.append(row)
        name = f"decode at {case.depth:,}" if case.kind == GENERATE else f"prefill of {case.n:,}"
        cells = (f"{row[codec]['tokens_per_s']:9.1f} t/s {row[codec]['ratio']:5.2f}" for codec in codecs)
        print(f"{name:<24}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
    name = Path(model).stem if model.endswith(".gguf") else model
    return {"model": name, "isa": native.isa(), "processor": cpu_name(), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codecs", default="bf16,int8,int4")
    parser.add_argument("--heads", default="9/3")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--keys", type=int, default=4095)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--model")
    parser.add_argument("--depths", default="4200,8000")
    parser.add_argument("--prefill", type=int, default=4096, help="tokens of a prompt (0: none)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    codecs = args.codecs.split(",")
    if args.model:
        depths = [int(depth) for depth in args.depths.split(",")]
        found = whole_model(codecs, args.model, depths, args.rounds or 60, args.prefill)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
        return
    heads, kv_heads = (int(n) for n in args.heads.split("/"))
    one_layer(codecs, LayerSpec(heads, kv_heads, args.dim, args.dim), args.keys, args.rounds or 100)


if __name__ == "__main__":
    main()
