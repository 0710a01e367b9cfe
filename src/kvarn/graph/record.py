"""Recording: runs a model's forward function and turns each call into a node with a width.

Recording checks all shapes. Backends use these widths to read memory, so a weight of the wrong shape is
refused here, with its name, before anything is loaded. Non-goals: computing, fusion (fuse.py), the
numbers in the weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from kvarn.errors import BadModel
from kvarn.graph.ops import Activation, Centre, Ops, Rope

Op = Literal["embed", "rms_norm", "linear", "rope", "centred", "attention", "gated", "add", "logits"]


@dataclass(frozen=True, slots=True)
class Value:
    """The output of a node: one row of `width` numbers per token."""

    id: int  # index of the node
    width: int


class Heads(NamedTuple):
    n_heads: int
    n_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Node:
    op: Op
    inputs: tuple[Value, ...]
    weights: tuple[str, ...]
    settings: tuple[Any, ...]  # rms_norm: heads; rope: heads, Rope; attention: layer, scale, Heads; ...
    out: Value


@dataclass(frozen=True, slots=True)
class Graph:
    nodes: tuple[Node, ...]  # node i makes value i

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights, in order of first use."""
        return tuple(dict.fromkeys(name for node in self.nodes for name in node.weights))


class HasHeads(Protocol):
    """The part of a model's configuration that recording needs."""

    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


Config = TypeVar("Config", bound=HasHeads)


def record(
    forward: Callable[[Ops[Value], Config], object], config: Config, shapes: Mapping[str, Sequence[int]]
) -> Graph:
    """Record the calls of `forward`. `shapes` are the shapes of the weights in the model file."""
    recorder = Recorder(Heads(config.n_heads, config.n_kv_heads, config.head_dim), shapes)
    forward(recorder, config)
    return Graph(tuple(recorder.nodes))


def name_of(value: Value, nodes: Sequence[Node]) -> str:
    """The name of a value in error messages: `linear blk.0.attn_q.weight`, `attention of layer 0`, `add (node 7)`."""
    node = nodes[value.id]
    if node.op == "attention":
        return f"attention of layer {node.settings[0]}"
    if node.op == "rope":
        return f"rope of {name_of(node.inputs[0], nodes)}"
    return f"{node.op} {node.weights[0]}" if node.weights else f"{node.op} (node {value.id})"


class Recorder:
    def __init__(self, heads: Heads, shapes: Mapping[str, Sequence[int]]) -> None:
        self.nodes: list[Node] = []
        self._heads = heads
        self._shapes = shapes

    def has(self, weight: str) -> bool:
        return weight in self._shapes

    def embed(self, weight: str, scale: float = 1.0) -> Value:
        _, width = self._matrix(weight)
        return self._node("embed", (), (weight,), width, scale)

    def rms_norm(self, x: Value, weight: str, heads: int = 1) -> Value:
        self._divides(heads, x)
        self._expect(weight, (x.width // heads,))
        return self._node("rms_norm", (x,), (weight,), x.width, heads)

    def linear(self, x: Value, weight: str, bias: str | None = None) -> Value:
        rows, _ = self._matrix(weight)
        self._expect(weight, (rows, x.width))
        if bias is None:
            return self._node("linear", (x,), (weight,), rows)
        self._expect(bias, (rows,))
        return self._node("linear", (x,), (weight, bias), rows)

    def rope(self, x: Value, heads: int, rope: Rope) -> Value:
        self._divides(heads, x)
        if rope.dim > x.width // heads or rope.dim % 2:
            raise BadModel(f"rope of {self._name(x)}: {rope.dim} dimensions of a head of {x.width // heads}")
        return self._node("rope", (x,), (), x.width, heads, rope)

    def centred(self, k: Value, heads: int, centre: Centre) -> Value:
        self._divides(heads, k)
        self._expect(centre.bias, (k.width,))
        return self._node("centred", (k,), (centre.bias,), k.width, heads, centre)

    def attention(self, layer: int, q: Value, k: Value, v: Value, scale: float) -> Value:
        n_heads, n_kv_heads, dim = self._heads
        for letter, x, n in (("q", q, n_heads), ("k", k, n_kv_heads), ("v", v, n_kv_heads)):
            if x.width != n * dim:
                what = f"attention of layer {layer}: {letter} ({self._name(x)})"
                raise BadModel(f"{what} is {x.width} wide, and {n} heads of {dim} are {n * dim}")
        return self._node("attention", (q, k, v), (), q.width, layer, scale, self._heads)

    def gated(self, gate: Value, up: Value, activation: Activation) -> Value:
        self._equal("gated", gate, up)
        return self._node("gated", (gate, up), (), gate.width, activation)

    def add(self, x: Value, y: Value) -> Value:
        self._equal("add", x, y)
        return self._node("add", (x, y), (), x.width)

    def logits(self, x: Value, weight: str) -> Value:
        vocabulary, _ = self._matrix(weight)
        self._expect(weight, (vocabulary, x.width))
        for node in self.nodes:
            if node.op == "embed":  # it has the same vocabulary
                self._expect(node.weights[0], (vocabulary, node.out.width))
        return self._node("logits", (x,), (weight,), vocabulary)

    # -- checks --------------------------------------------------------------------------------------------------

    def _node(self, op: Op, inputs: tuple[Value, ...], weights: tuple[str, ...], width: int, *settings: Any) -> Value:
        out = Value(len(self.nodes), width)
        self.nodes.append(Node(op, inputs, weights, settings, out))
        return out

    def _name(self, value: Value) -> str:
        return name_of(value, self.nodes)

    def _shape(self, weight: str) -> tuple[int, ...]:
        if weight not in self._shapes:
            raise BadModel(f"the model has no tensor {weight}")
        return tuple(self._shapes[weight])

    def _matrix(self, weight: str) -> tuple[int, int]:
        shape = self._shape(weight)
        if len(shape) != 2:
            raise BadModel(f"tensor {weight} is {shape}, and a matrix has two dimensions")
        return shape[0], shape[1]

    def _expect(self, weight: str, wanted: tuple[int, ...]) -> None:
        if self._shape(weight) != wanted:
            raise BadModel(f"tensor {weight} is {self._shape(weight)}; the model needs {wanted} here")

    def _divides(self, heads: int, x: Value) -> None:
        if x.width % heads:
            raise BadModel(f"{self._name(x)} is {x.width} wide, which is not a multiple of {heads} heads")

    def _equal(self, op: str, x: Value, y: Value) -> None:
        if x.width != y.width:
            raise BadModel(f"{op}: {self._name(x)} is {x.width} wide and {self._name(y)} is {y.width}")
