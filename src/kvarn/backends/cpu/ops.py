"""A model's calls, recorded: each becomes a node, and a node is known by its number."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvarn.graph.ops import Activation, Rope


@dataclass(frozen=True, slots=True)
class Node:
    op: str  # embed, rms_norm, linear, rope, attention, gated, add, logits
    inputs: tuple[int, ...]
    weights: tuple[str, ...] = ()
    settings: tuple[Any, ...] = ()


class RecordingOps:
    def __init__(self, has: Callable[[str], bool]) -> None:
        self.has = has
        self.nodes: list[Node] = []

    def _add(self, op: str, inputs: tuple[int, ...], weights: tuple[str, ...] = (), *settings: Any) -> int:
        self.nodes.append(Node(op, inputs, weights, settings))
        return len(self.nodes) - 1

    def embed(self, weight: str, scale: float = 1.0) -> int:
        return self._add("embed", (), (weight,), scale)

    def rms_norm(self, x: int, weight: str, heads: int = 1) -> int:
        return self._add("rms_norm", (x,), (weight,), heads)

    def linear(self, x: int, weight: str, bias: str | None = None) -> int:
        return self._add("linear", (x,), (weight,) if bias is None else (weight, bias))

    def rope(self, x: int, heads: int, rope: Rope) -> int:
        return self._add("rope", (x,), (), heads, rope)

    def attention(self, layer: int, q: int, k: int, v: int, scale: float) -> int:
        return self._add("attention", (q, k, v), (), layer, scale)

    def gated(self, gate: int, up: int, activation: Activation) -> int:
        return self._add("gated", (gate, up), (), activation)

    def add(self, x: int, y: int) -> int:
        return self._add("add", (x, y))

    def logits(self, x: int, weight: str) -> int:
        return self._add("logits", (x,), (weight,))
