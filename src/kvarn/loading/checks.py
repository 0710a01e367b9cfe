"""What every architecture's configuration must satisfy, whichever file it came from.

Non-goals: reading settings (gguf_config.py, hf_config.py), running a model (models/).
"""

from collections.abc import Mapping

from kvarn.errors import BadModel
from kvarn.graph.ops import FactorScaling
from kvarn.models.config import ModelConfig

_REMEDY = "fetch or convert the model again"


def known(where: str, name: str, architectures: Mapping[str, str]) -> str:
    """kvarn's name for the architecture that the file names."""
    if name not in architectures:
        raise BadModel(f"{where} is a {name} model, and kvarn runs: {', '.join(architectures)}; use one of those")
    return architectures[name]


def known_windows(
    where: str, n_tensors: int, n_layers: int, context: int, choice: tuple[int | None, int | list[bool] | None]
) -> tuple[int | None, ...]:
    """A window for each layer: `choice` is the window and who has it (all, all but every n-th, or a list).

    One that all layers have and that is no shorter than the context hides nothing, and is none.
    """
    if n_layers > n_tensors:  # before a tuple of four billion entries is made
        raise BadModel(f"{where} says {n_layers} layers and has only {n_tensors} tensors; {_REMEDY}")
    window, local = choice
    if window is None:
        return (None,) * n_layers
    if local is None:
        return (None if window >= context else window,) * n_layers
    if isinstance(local, int):
        return tuple(None if (i + 1) % local == 0 else window for i in range(n_layers))
    if len(local) < n_layers:
        raise BadModel(f"{where} says which of {len(local)} layers have a window and has {n_layers} layers; {_REMEDY}")
    return tuple(window if local[i] else None for i in range(n_layers))


def checked(where: str, n_tensors: int, config: ModelConfig) -> ModelConfig:
    """The same configuration, if its numbers fit together."""
    c = config
    faults = {
        f"{c.n_heads} heads do not share {c.n_kv_heads} key heads evenly": c.n_heads % c.n_kv_heads,
        f"the head size {c.head_dim} is odd": c.head_dim % 2,
        f"{c.rope.dim} of {c.head_dim} dimensions cannot be rotated": c.rope.dim % 2 or c.rope.dim > c.head_dim,
        f"{c.n_layers} layers are more than its {n_tensors} tensors": c.n_layers > n_tensors,
    }
    if isinstance(c.rope.scaling, FactorScaling):
        n = len(c.rope.scaling.factors)
        faults[f"rope_freqs.weight has {n} numbers, not {c.rope.dim // 2}"] = n != c.rope.dim // 2
    for fault, holds in faults.items():
        if holds:
            raise BadModel(f"{where} contradicts itself: {fault}; {_REMEDY}")
    return config
