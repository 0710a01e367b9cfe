"""The tensors of a model, as its forward function reads them, and their names in files.

A tensor has GGUF's name here, without the `blk.0.` of its layer. `Tensor.hf` is its name in a
Hugging Face folder, without the prefix of the layer (`model.layers.0.`) or of the model (`model.`).
Forward functions read canonical numbers:
- Rope rotates rows (i, i + dim/2) of a head together.
- A norm's weight is the factor that multiplies.
- Every projection is a tensor of its own.
A file may store something else. Its family says so, and loading/tensors.py undoes it.
Non-goals: reading numbers; finding a tensor in a file (loading/tensors.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvarn.models.config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    shape: Shape
    hf: str | None  # None: Hugging Face folders do not have it
    required: bool = True
    is_norm: bool = False
    rotated_heads: int = 0  # rope rotates the rows of so many heads


@dataclass(frozen=True, slots=True)
class Fused:
    """Tensors that files store as one: the rows of all parts, in order. Names lack `.weight`."""

    parts: tuple[str, ...]
    gguf: str
    hf: str


def norm(size: int, hf: str) -> Tensor:
    return Tensor((size,), f"{hf}.weight", is_norm=True)


def matrix(rows: int, columns: int, hf: str, rotated_heads: int = 0) -> Tensor:
    return Tensor((rows, columns), f"{hf}.weight", rotated_heads=rotated_heads)


def optional_bias(size: int, hf: str, rotated_heads: int = 0) -> Tensor:
    return Tensor((size,), f"{hf}.bias", required=False, rotated_heads=rotated_heads)


def require(tensors: Mapping[str, Tensor], *names: str) -> dict[str, Tensor]:
    """The same tensors; those with these names may not be missing."""
    return {**tensors, **{name: replace(tensors[name], required=True) for name in names}}


def outer_tensors(c: ModelConfig) -> dict[str, Tensor]:
    """The tensors outside the layers."""
    return {
        "token_embd.weight": matrix(c.vocab_size, c.hidden, "embed_tokens"),
        "output_norm.weight": norm(c.hidden, "norm"),
        # A model without it ties its output to the embedding.
        "output.weight": Tensor((c.vocab_size, c.hidden), "lm_head.weight", required=False),
        # The numbers of a rope scaling. config.json has them as settings.
        "rope_freqs.weight": Tensor((c.rope.dim // 2,), None, required=False),
    }
