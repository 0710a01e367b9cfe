"""The operations a model is written in, once per architecture. A backend gives them meaning.

A value is whatever the backend makes it: an array where calls compute at once, a handle where they are recorded for
replay. So a model file does no arithmetic of its own and looks at no value. Weights are named, by their canonical name.
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
    """Frequencies divided one by one: what a GGUF file carries as `rope_freqs.weight`."""

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
    dim: int  # dimensions of a head that are rotated, pairs (i, i + dim / 2)
    scaling: RopeScaling | None = None


class Ops(Protocol, Generic[V]):
    def embed(self, weight: str, scale: float = 1.0) -> V:
        """The step's tokens, [T, hidden]."""

    def rms_norm(self, x: V, weight: str, heads: int = 1) -> V:
        """Over the last dimension, or over each of `heads` parts of it."""

    def linear(self, x: V, weight: str, bias: str | None = None) -> V: ...

    def rope(self, x: V, heads: int, rope: Rope) -> V:
        """Each head rotated at its token's absolute position."""

    def attention(self, layer: int, q: V, k: V, v: V, scale: float) -> V:
        """Write k and v into the cache, then attend over the cache: never over the fresh values."""

    def gated(self, gate: V, up: V, activation: Activation) -> V: ...

    def add(self, x: V, y: V) -> V: ...

    def logits(self, x: V, weight: str) -> V:
        """[rows, vocabulary], for the rows that the step asks for."""

    def has(self, weight: str) -> bool: ...
