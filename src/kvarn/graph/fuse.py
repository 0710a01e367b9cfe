"""Fusion: turns the recorded nodes into the operations that backends run.

- Matrices with the same input become one Product (q, k and v; gate and up).
- A sum that follows a matrix becomes part of the Product. A sum that follows a norm becomes NormAdd.
- Norms, rotations and the centring of heads, and the write into the cache, become part of Attention.
- After the last Attention, only the rows that the step asks for are computed.

Rows are independent except in attention, so fusion does not change a bit of the results. A graph that
does not fit these rules is refused with the name of the operation when the model is loaded. Non-goals:
graphs that no model has; memory, weight types and launches, which are a backend's work (emit).
"""

from collections.abc import Callable
from typing import NamedTuple

from kvarn.errors import KvarnError
from kvarn.graph.kinds import (
    Add,
    Attention,
    Embed,
    Gate,
    Kind,
    Logits,
    Norm,
    NormAdd,
    Product,
    Segment,
    Select,
    makes,
    reads,
    uses_up,
)
from kvarn.graph.ops import Centre, Rope
from kvarn.graph.record import Graph, Node, Value, name_of


def fuse(graph: Graph) -> list[Kind]:
    kinds = _Fusion(graph).run()
    _check_uses(kinds, graph)
    return _select(kinds)


class _Side(NamedTuple):
    """The norm, the rope and the centre that attention applies to q or k."""

    value: Value
    norm: str | None
    rope: Rope | None
    centre: Centre | None


class _Fusion:
    """One pass over the nodes. A handler returns a kind and marks the other nodes that the kind includes."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = graph.nodes
        self.users: list[list[Node]] = [[] for _ in graph.nodes]
        for node in graph.nodes:
            for x in node.inputs:
                self.users[x.id].append(node)
        self.kinds: list[Kind] = []
        self.made: set[Value] = set()
        self.done: set[Value] = set()  # outputs of nodes that are already part of a kind
        self.sides: dict[Value, tuple[_Side, _Side]] = {}  # (q, k) of each attention

    def run(self) -> list[Kind]:
        ops = [node.op for node in self.nodes]
        if "attention" not in ops:
            raise KvarnError("the model has no attention: kvarn cannot run it")
        if "logits" not in ops or ops.index("logits") != len(ops) - 1:
            raise KvarnError("the model's last operation is not logits: kvarn cannot run it")
        for node in self.nodes:
            if node.op == "attention":
                self.sides[node.out] = self._side(node, 0), self._side(node, 1)
        for node in self.nodes:
            if node.out not in self.done:
                handler: Callable[[Node], Kind] = getattr(self, f"_{node.op}")
                self._put(handler(node))
        return self.kinds

    def _put(self, kind: Kind) -> None:
        self.kinds.append(kind)
        self.made.update(makes(kind))

    def _name(self, value: Value) -> str:
        return name_of(value, self.nodes)

    # -- one handler per operation -------------------------------------------------------------------------------

    def _embed(self, node: Node) -> Kind:
        return Embed(node.out, node.weights[0], node.settings[0])

    def _rms_norm(self, node: Node) -> Kind:
        (x,), (weight,), (heads,) = node.inputs, node.weights, node.settings
        if heads != 1:
            raise KvarnError(f"{self._name(node.out)}: a norm per head is possible for q and k of attention only")
        if (add := self._sum_of(node)) is not None:
            return NormAdd(self._take(add), x, weight, _other(add, node.out))
        self._for_matrices(node)
        return Norm(node.out, x, weight)

    def _linear(self, node: Node) -> Kind:
        x = self._from_rows(node)
        group = [user for user in self.users[x.id] if user.op == "linear"]
        self.done.update(user.out for user in group)
        return Product(x, tuple(self._segment(user) for user in group))

    def _segment(self, node: Node) -> Segment:
        matrix, bias = (*node.weights, None)[:2]
        assert matrix is not None
        if (add := self._sum_of(node)) is None:
            return Segment(node.out, matrix, bias)
        return Segment(self._take(add), matrix, bias, _other(add, node.out))

    def _rope(self, node: Node) -> Kind:
        raise KvarnError(f"{self._name(node.inputs[0])}: rope is possible for q and k of attention only")

    def _centred(self, node: Node) -> Kind:
        raise KvarnError(f"{self._name(node.inputs[0])}: centring is possible for k of attention only")

    def _attention(self, node: Node) -> Kind:
        layer, scale, heads = node.settings
        (q, q_norm, rope, q_centre), (k, k_norm, k_rope, centre) = self.sides[node.out]
        if rope != k_rope:
            raise KvarnError(f"{self._name(node.out)}: the ropes of q and k differ ({rope} and {k_rope})")
        if q_centre is not None:
            raise KvarnError(f"{self._name(node.out)}, q: only keys are centred")
        return Attention(node.out, q, k, node.inputs[2], q_norm, k_norm, rope, centre, layer, scale, heads)

    def _gated(self, node: Node) -> Kind:
        self._for_matrices(node)
        (gate, up), (activation,) = node.inputs, node.settings
        return Gate(node.out, gate, up, activation)

    def _add(self, node: Node) -> Kind:
        into, x = node.inputs
        return Add(node.out, x, into)

    def _logits(self, node: Node) -> Kind:
        return Logits(self._from_rows(node), node.weights[0])

    # -- decisions -----------------------------------------------------------------------------------------------

    def _sum_of(self, node: Node) -> Node | None:
        """The add node that this node can include: the node's only reader, whose other input is already computed."""
        users = self.users[node.out.id]
        if len(users) != 1 or users[0].op != "add":
            return None
        return users[0] if _other(users[0], node.out) in self.made else None

    def _take(self, node: Node) -> Value:
        self.done.add(node.out)
        return node.out

    def _for_matrices(self, node: Node) -> None:
        for user in self.users[node.out.id]:
            if user.op not in ("linear", "logits"):
                raise KvarnError(f"{self._name(node.out)} is read by {self._name(user.out)}: only a matrix may read it")

    def _from_rows(self, node: Node) -> Value:
        """The input of a matrix. Only these operations can round their output for a matrix."""
        x = node.inputs[0]
        if self.nodes[x.id].op not in ("rms_norm", "gated", "attention"):
            read = f"{self._name(node.out)} reads {self._name(x)}"
            raise KvarnError(f"{read}: a matrix may read a norm, a gate or attention")
        return x

    def _side(self, attention: Node, which: int) -> _Side:
        """Walk back from attention to the matrix that makes q (0) or k (1)."""
        what, x = f"{self._name(attention.out)}, {'qk'[which]}", attention.inputs[which]
        norm: str | None = None
        rope: Rope | None = None
        centre: Centre | None = None
        while (node := self.nodes[x.id]).op in ("rope", "rms_norm", "centred"):
            if node.settings[0] != attention.settings[2][which]:
                raise KvarnError(f"{what}: {self._name(x)} has another number of heads than attention")
            if node.op == "rope" and (rope or norm):
                raise KvarnError(f"{what}: {'a second rope' if rope else 'rope before the norm'}")
            if node.op == "rms_norm" and norm:
                raise KvarnError(f"{what}: a second norm, {node.weights[0]}")
            if node.op == "centred" and (rope or norm or centre):
                raise KvarnError(f"{what}: centred a second time, or before rope or the norm")
            if node.op == "centred":
                centre = node.settings[1]
            elif node.op == "rope":
                rope = node.settings[1]
            else:
                norm = node.weights[0]
            self.done.add(x)
            self._alone(what, x)
            x = node.inputs[0]
        self._alone(what, x)
        return _Side(x, norm, rope, centre)

    def _alone(self, what: str, x: Value) -> None:
        if len(self.users[x.id]) != 1:
            raise KvarnError(f"{what}: {self._name(x)} is read by others as well")


def _other(add: Node, one: Value) -> Value:
    x, y = add.inputs
    return y if x == one else x


def _check_uses(kinds: list[Kind], graph: Graph) -> None:
    """Refuse a graph that reads a value after a kind has overwritten it."""
    writers: dict[Value, str] = {}  # overwritten values, and the kind that wrote
    for kind in kinds:
        read, used_up, name = reads(kind), uses_up(kind), type(kind).__name__
        for x in read:
            if x in writers or (x in used_up and read.count(x) > 1):
                writer = writers.get(x, name)
                raise KvarnError(f"{name_of(x, graph.nodes)} is still needed when {writer} overwrites it")
        writers |= dict.fromkeys(used_up, name)


def _select(kinds: list[Kind]) -> list[Kind]:
    """Insert a Select after the last attention, over the values that are read later."""
    end = 1 + max(i for i, kind in enumerate(kinds) if isinstance(kind, Attention))
    read = {x for kind in kinds[end:] for x in reads(kind)}
    made = {x for kind in kinds[:end] for x in makes(kind)}
    live = sorted(made & read, key=lambda value: value.id)
    return [*kinds[:end], Select(tuple(live)), *kinds[end:]]
