"""Which weights a model needs: found by running its forward function over operations that only take notes."""

from collections.abc import Callable

from kvarn.graph.ops import Activation, Rope
from kvarn.models.config import ModelConfig


class _Notes:
    """Operations on nothing, noting the weights they are given."""

    def __init__(self, has: Callable[[str], bool]) -> None:
        self.has = has
        self.names: dict[str, None] = {}  # in order of first use

    def _note(self, *names: str | None) -> None:
        self.names.update((name, None) for name in names if name is not None)

    def embed(self, weight: str, scale: float = 1.0) -> None:
        self._note(weight)

    def rms_norm(self, x: None, weight: str, heads: int = 1) -> None:
        self._note(weight)

    def linear(self, x: None, weight: str, bias: str | None = None) -> None:
        self._note(weight, bias)

    def rope(self, x: None, heads: int, rope: Rope) -> None:
        pass

    def attention(self, layer: int, q: None, k: None, v: None, scale: float) -> None:
        pass

    def gated(self, gate: None, up: None, activation: Activation) -> None:
        pass

    def add(self, x: None, y: None) -> None:
        pass

    def logits(self, x: None, weight: str) -> None:
        self._note(weight)


Forward = Callable[[_Notes, ModelConfig], object]


def needed(forward: Forward, config: ModelConfig, has: Callable[[str], bool]) -> list[str]:
    notes = _Notes(has)
    forward(notes, config)
    return list(notes.names)
