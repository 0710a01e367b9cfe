"""The operations in which a model is written, once per architecture. A backend implements them.

The backend chooses the type of a value: an array if a call computes at once, a handle if calls are
recorded. A model file therefore does no arithmetic and never looks into a value. It refers to weights
by their canonical names.
"""

from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

V = TypeVar("V")
Activation = Literal["silu", "gelu"]  # gelu: the tanh approximation


@dataclass(frozen=True, slots=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """Each frequency has its own divisor. A GGUF file stores them as `rope_freqs.weight`."""

    factors: tuple[float, ...]  # [rope_dim / 2]


@dataclass(frozen=True, slots=True)
class YarnScaling:
    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 1 + 0.1 ln(factor)


RopeScaling = LinearScaling | Llama3Scaling | FactorScaling | YarnScaling


@dataclass(frozen=True, slots=True)
class Rope:
    base: float
    dim: int  # rotated dimensions of a head, in pairs (i, i + dim / 2)
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class Centre:
    """A constant vector per head, made of the bias of K: models/centre.py."""

    bias: str  # name of the weight
    rope: Rope
    context: int  # positions that the model was trained for


class Ops(Protocol, Generic[V]):
    def embed(self, weight: str, scale: float = 1.0) -> V:
        """Embeddings of the step's tokens, [T, hidden]."""

    def rms_norm(self, x: V, weight: str, heads: int = 1) -> V:
        """Over the last dimension, or over each of `heads` parts of it."""

    def linear(self, x: V, weight: str, bias: str | None = None) -> V: ...

    def rope(self, x: V, heads: int, rope: Rope) -> V:
        """Rotate each head by its token's absolute position."""

    def centred(self, k: V, heads: int, centre: Centre) -> V:
        """Subtract the centre from keys. Softmax does not change when all keys of a head move by the same vector, and
        the cells lose less of smaller numbers."""

    def attention(self, layer: int, q: V, k: V, v: V, scale: float) -> V:
        """Write k and v into the cache, then attend over the cache. The new k and v are read from the cache too."""

    def gated(self, gate: V, up: V, activation: Activation) -> V: ...

    def add(self, x: V, y: V) -> V: ...

    def logits(self, x: V, weight: str) -> V:
        """[rows, vocabulary], for the rows that the step asks for."""

    def has(self, weight: str) -> bool: ...
