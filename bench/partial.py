"""Compares reusing a part of a block (copying its first tokens in every layer) with computing these tokens.

python bench/partial.py            # copies, for SmolLM2's shape: 30 layers, 3 KV heads of 64, bf16
python bench/partial.py smollm2    # also measures one prompt token on the model
"""

import sys
import time

from kvarn.backends.host import HostMemory, copy
from kvarn.backends.reference import Reference
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.step import Copy


def copy_seconds(memory: HostMemory, slots: int) -> float:
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for store in memory.stores:
            copy([Copy(0, 1, slots)], store)
        best = min(best, time.perf_counter() - start)
    return best


def token_seconds(model: str) -> float:
    from kvarn import LLM, SamplingParams

    llm = LLM(model, context=512, max_seqs=1, backend="cpu")
    llm.generate([[1] * 64], SamplingParams(max_tokens=1))
    start = time.perf_counter()
    llm.generate([[2] * 256], SamplingParams(max_tokens=1))
    return (time.perf_counter() - start) / 256


def main() -> None:
    layers = [LayerSpec(n_heads=9, n_kv_heads=3, k_dim=64, v_dim=64)] * 30
    memory = Reference().memory(plan(CacheConfig(layers, context=512, strategy="paged", codec="bf16")))
    for slots in (1, 4, 16, 31):
        print(f"copy {slots:>2} tokens   {1e6 * copy_seconds(memory, slots):8.0f} us")
    if len(sys.argv) > 1:
        print(f"compute 1 token  {1e6 * token_seconds(sys.argv[1]):8.0f} us")


if __name__ == "__main__":
    main()
