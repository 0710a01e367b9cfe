"""The operations a model is written in, once per architecture. A backend gives them meaning.

A value is whatever the backend makes it: an array where calls compute at once, a handle where they are recorded for
replay. So a model file does no arithmetic of its own and looks at no value. Weights are named, by their canonical name.
"""

from typing import Generic, Literal, Protocol, TypeVar

from kvarn.models.config import Rope

V = TypeVar("V")
Activation = Literal["silu", "gelu"]  # gelu: the tanh approximation


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
