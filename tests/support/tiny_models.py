"""Tiny models of every architecture: three sizes, the tensors of each, random weights.

The tensors are written down here a second time, apart from kvarn/models: a wrong name or shape there
fails a test. tiny_files.py writes these models as GGUF files and as Hugging Face folders.
Non-goals: sensible text.
"""

from dataclasses import dataclass

import numpy as np

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "phi3")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Size:
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden: int
    feed_forward: int
    vocab_size: int
    context: int
    norm_eps: float
    rope_base: float
    window: int  # of architectures that have local layers


LOADING = Size(2, 4, 2, 8, 32, 64, 48, 128, norm_eps=2.0**-20, rope_base=50_000.0, window=16)
ENGINE = Size(3, 4, 2, 16, 48, 80, 101, 256, norm_eps=1e-5, rope_base=10_000.0, window=24)
# tests/golden has llama.cpp's answers and hashes of our bits for models of this size.
GOLDEN = Size(3, 4, 2, 32, 128, 96, 256 + 3, 256, norm_eps=1e-5, rope_base=10_000.0, window=8)


def shapes(architecture: str, size: Size, *, tied: bool, biases: bool = False) -> dict[str, Shape]:
    """Canonical tensors by GGUF's names. The golden models draw their numbers in this order."""
    outer: dict[str, Shape] = {
        "token_embd.weight": (size.vocab_size, size.hidden),
        "output_norm.weight": (size.hidden,),
    }
    if not tied:
        outer["output.weight"] = (size.vocab_size, size.hidden)
    layer = layer_shapes(architecture, size, biases or architecture == "qwen2")
    return outer | {f"blk.{i}.{part}": shape for i in range(size.n_layers) for part, shape in layer.items()}


def layer_shapes(architecture: str, size: Size, biases: bool) -> dict[str, Shape]:
    wide, narrow = size.n_heads * size.head_dim, size.n_kv_heads * size.head_dim
    found: dict[str, Shape] = {
        "attn_norm.weight": (size.hidden,),
        "ffn_norm.weight": (size.hidden,),
        "attn_output.weight": (size.hidden, wide),
        "ffn_down.weight": (size.hidden, size.feed_forward),
    }
    for name, rows in (("q", wide), ("k", narrow), ("v", narrow)):
        found[f"attn_{name}.weight"] = (rows, size.hidden)
        if biases:
            found[f"attn_{name}.bias"] = (rows,)
    found |= {f"ffn_{name}.weight": (size.feed_forward, size.hidden) for name in ("gate", "up")}
    if architecture in ("qwen3", "gemma3"):
        found |= {f"attn_{name}_norm.weight": (size.head_dim,) for name in "qk"}
    if architecture == "gemma3":
        found |= {f"post_{name}_norm.weight": (size.hidden,) for name in ("attention", "ffw")}
    return found


def weights(architecture: str, *, tied: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Canonical tensors of the size LOADING, of numbers that F16 and BF16 hold exactly."""
    random = np.random.default_rng(seed)
    drawn = {  # llama may have biases and qwen2 must
        name: (random.integers(-128, 128, shape) / 64).astype(np.float32)
        for name, shape in shapes(architecture, LOADING, tied=False, biases=architecture == "llama").items()
    }
    if tied:  # after drawing: tying changes no other tensor
        del drawn["output.weight"]
    return drawn
