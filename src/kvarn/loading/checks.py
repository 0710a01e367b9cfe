"""Checks for both kinds of file: kvarn has the family, and the sizes fit together.

Non-goals: reading settings (gguf_config.py, hf_config.py); tensors (tensors.py).
"""

from collections.abc import Mapping

from kvarn.errors import BadModel
from kvarn.graph.ops import FactorScaling
from kvarn.models.config import ModelConfig
from kvarn.models.family import Family


def find_family(where: str, name: str, families: Mapping[str, Family]) -> Family:
    """`families` has the names that this kind of file uses."""
    if name not in families:
        raise BadModel(f"{where} is a {name} model, and kvarn runs: {', '.join(families)}; use one of those")
    return families[name]


def check_config(where: str, n_tensors: int, config: ModelConfig) -> None:
    """Raise unless the numbers fit together. Call it before anything is made for each layer."""
    c = config
    faults = {
        f"{c.n_heads} heads do not share {c.n_kv_heads} key heads evenly": c.n_heads % c.n_kv_heads,
        f"the head size {c.head_dim} is odd": c.head_dim % 2,
        f"{c.rope.dim} of {c.head_dim} dimensions cannot be rotated": c.rope.dim % 2 or c.rope.dim > c.head_dim,
        f"it says {c.n_layers} layers and has only {n_tensors} tensors": c.n_layers > n_tensors,
    }
    if isinstance(c.rope.scaling, FactorScaling):
        n = len(c.rope.scaling.factors)
        faults[f"rope_freqs.weight has {n} numbers, not {c.rope.dim // 2}"] = n != c.rope.dim // 2
    for fault, holds in faults.items():
        if holds:
            raise BadModel(f"{where} contradicts itself: {fault}; fetch or convert the model again")
