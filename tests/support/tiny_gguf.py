"""The golden models: tiny GGUF files with a tokenizer, one per architecture and rope scaling.

The bytes are the same each time: tests/golden has llama.cpp's answers for these files
(scripts/golden_tiny.py) and hashes of our bits (tests/bitwise.py). Numbers are drawn as stored: no
rows are moved and no parts are joined afterwards.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from support.gguf_writer import Tensor, gguf
from support.tiny_files import Keys, gguf_keys, in_gguf, local_keys
from support.tiny_models import GOLDEN, Shape, Size, shapes

VARIANTS = (
    "llama",
    "llama-linear",
    "llama-llama3",
    "llama-yarn",
    "qwen2",
    "qwen3",
    "gemma3",
    "phi3",
)
# Sizes of variants that need more layers than GOLDEN has to show every kind of layer.
SIZES: dict[str, Size] = {}
TIED = ("gemma3",)
SCALINGS: dict[str, Keys] = {
    "linear": {"rope.scaling.type": ("str", "linear"), "rope.scaling.factor": ("f32", 4.0)},
    "yarn": {
        "rope.scaling.type": ("str", "yarn"),
        "rope.scaling.factor": ("f32", 4.0),
        "rope.scaling.original_context_length": ("u32", 64),
    },
}
CHAT = """{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
_ALIGNMENT = 32


def byte_tokens() -> list[str]:
    """GPT-2's printable names of the 256 bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return [chr(b) if b in shown else chr(256 + hidden.index(b)) for b in range(256)]


def write(
    path: Path,
    variant: str,
    chat_template: str | None = None,
    size: Size | None = None,
    draw: Callable[[Shape], np.ndarray] | None = None,
    keys: Keys | None = None,
) -> Path:
    """`draw` gives weights of a shape, of variance 1; without it they are normal. `keys` replace those of the model."""
    architecture, _, scaling = variant.partition("-")
    size = size or SIZES.get(variant, GOLDEN)
    # llama.cpp has special rules for models with some names (phi-3).
    given = gguf_keys(architecture, size, name="tiny")
    given |= {f"{architecture}.{key}": value for key, value in SCALINGS.get(scaling, {}).items()}
    given |= local_keys(architecture, size) | tokenizer_keys(chat_template) | (keys or {})
    tensors = []
    if scaling == "llama3":
        tensors.append(Tensor.of("rope_freqs.weight", np.linspace(1.0, 8.0, size.head_dim // 2)))
    draw = draw or np.random.default_rng(sum(map(ord, variant))).standard_normal
    for name, shape in stored_shapes(architecture, size).items():
        spread = 0.1 if "norm" in name else 1.5 * shape[-1] ** -0.5
        tensors.append(Tensor.of(name, draw(shape) * spread + (1 if "norm" in name else 0)))
    content = gguf([(key, *value) for key, value in given.items()], tensors, alignment=_ALIGNMENT)
    path.write_bytes(content + bytes(-len(content) % _ALIGNMENT))
    return path


def tokenizer_keys(chat_template: str | None) -> Keys:
    """With a chat template, the vocabulary has what the merges make, so that it can encode text."""
    last, kinds = (["</s>", "<unk>"], [3, 3]) if chat_template is None else (["ab", "cd"], [1, 1])
    keys: Keys = {
        "tokenizer.ggml.model": ("str", "gpt2"),
        "tokenizer.ggml.pre": ("str", "gpt-2"),
        "tokenizer.ggml.tokens": ("[str", [*byte_tokens(), "<|endoftext|>", *last]),
        "tokenizer.ggml.token_type": ("[i32", [1] * 256 + [3, *kinds]),
        "tokenizer.ggml.merges": ("[str", ["a b", "c d"]),
        "tokenizer.ggml.bos_token_id": ("u32", 256),
        "tokenizer.ggml.eos_token_id": ("u32", 256),
    }
    return keys if chat_template is None else keys | {"tokenizer.chat_template": ("str", chat_template)}


def stored_shapes(architecture: str, size: Size) -> dict[str, Shape]:
    def join(parts: list[Shape]) -> Shape:
        return (sum(part[0] for part in parts), *parts[0][1:])

    return in_gguf(architecture, shapes(architecture, size, tied=architecture in TIED), join)


def tokens(variant: str) -> list[int]:
    return np.random.default_rng(len(variant)).integers(0, 256, 60).tolist()
