"""A model's sizes and constants. The record is the same for every file format.

Loading makes the record. Forward functions and the cache read it.
Non-goals: settings of a file that do not change what is computed.
"""

from dataclasses import dataclass

from kvarn.cache.spec import LayerSpec
from kvarn.graph.ops import Rope


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str  # the family's name
    name: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden: int
    feed_forward: int
    vocab_size: int
    context: int  # the longest sequence the model was trained for
    norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]  # by layer; None sees everything
    local_rope: Rope | None = None  # of layers with a window, where it differs
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)

    @property
    def q_width(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """What the cache must hold for each layer."""
        return tuple(LayerSpec(self.n_heads, self.n_kv_heads, self.head_dim, self.head_dim, w) for w in self.windows)

    def rope_of(self, layer: int) -> Rope:
        local = self.windows[layer] is not None and self.local_rope is not None
        return self.local_rope if local and self.local_rope is not None else self.rope
