"""From recorded nodes to the operations that backends run, joined where it pays on every device.

- Matrices with the same input are one product (q, k and v; gate and up).
- A sum whose one side is a matrix's fresh output is done by the matrix; a norm followed by a sum is one operation.
- Norms and rotations of heads, and the write into the cache, happen inside attention.
- Past the last attention only the rows that the step asks for are computed.

Rows are independent everywhere but in attention, so none of this changes a bit. What does not fit is refused by name
when the model is loaded. Non-goals: graphs that no model has; memory, types of weights, launches (a backend's emit).
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
from kvarn.graph.ops import Rope
from kvarn.graph.record import Graph, Node, Value, name_of


def fuse(graph: Graph) -> list[Kind]:
    kinds = _Fusion(graph).run()
    _check_uses(kinds, graph)
    return _select(kinds)


class _Side(NamedTuple):
    """What attention does to q or k before it uses it."""

    value: Value
    norm: str | None
    rope: Rope | None


class _Fusion:
    """One pass over the nodes. A handler adds a kind and marks the nodes that it took along."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = graph.nodes
        self.users: list[list[Node]] = [[] for _ in graph.nodes]
        for node in graph.nodes:
            for x in node.inputs:
                self.users[x.id].append(node)
        self.kinds: list[Kind] = []
        self.made: set[Value] = set()
        self.done: set[Value] = set()  # outputs of nodes that are part of some kind
        self.sides: dict[Value, tuple[_Side, _Side]] = {}  # of each attention: q and k

    def run(self) -> list[Kind]:
        ops = [node.op for node in self.nodes]
        if "attention" not in ops:
            raise KvarnError("a model has attention: no program without")
        if "logits" not in ops or ops.index("logits") != len(ops) - 1:
            raise KvarnError("a model's logits are its last operation: no program without")
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

    def _attention(self, node: Node) -> Kind:
        layer, scale, heads = node.settings
        (q, q_norm, rope), (k, k_norm, k_rope) = self.sides[node.out]
        if rope != k_rope:
            raise KvarnError(f"{self._name(node.out)}: the ropes of q and k differ ({rope} and {k_rope})")
        return Attention(node.out, q, k, node.inputs[2], q_norm, k_norm, rope, layer, scale, heads)

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
        """The sum that this node can do along: nobody else reads the node, and the other side is there already."""
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
        """A matrix's input. Who makes it also rounds it for the matrix."""
        x = node.inputs[0]
        if self.nodes[x.id].op not in ("rms_norm", "gated", "attention"):
            read = f"{self._name(node.out)} reads {self._name(x)}"
            raise KvarnError(f"{read}: a matrix may read a norm, a gate or attention")
        return x

    def _side(self, attention: Node, which: int) -> _Side:
        """Back from attention to the matrix that makes q (0) or k (1)."""
        what, x = f"{self._name(attention.out)}, {'qk'[which]}", attention.inputs[which]
        norm: str | None = None
        rope: Rope | None = None
        while (node := self.nodes[x.id]).op in ("rope", "rms_norm"):
            if node.settings[0] != attention.settings[2][which]:
                raise KvarnError(f"{what}: {self._name(x)} has other heads than attention")
            if node.op == "rope" and (rope or norm):
                raise KvarnError(f"{what}: {'a second rope' if rope else 'rope before the norm'}")
            if node.op == "rms_norm" and norm:
                raise KvarnError(f"{what}: a second norm, {node.weights[0]}")
            if node.op == "rope":
                rope = node.settings[1]
            else:
                norm = node.weights[0]
            self.done.add(x)
            self._alone(what, x)
            x = node.inputs[0]
        self._alone(what, x)
        return _Side(x, norm, rope)

    def _alone(self, what: str, x: Value) -> None:
        if len(self.users[x.id]) != 1:
            raise KvarnError(f"{what}: {self._name(x)} is read by others as well")


def _other(add: Node, one: Value) -> Value:
    x, y = add.inputs
    return y if x == one else x


def _check_uses(kinds: list[Kind], graph: Graph) -> None:
    """Nobody reads a value that is used up."""
    gone: dict[Value, str] = {}
    for kind in kinds:
        read, used_up, name = reads(kind), uses_up(kind), type(kind).__name__
        for x in read:
            if x in gone or (x in used_up and read.count(x) > 1):
                writer = gone.get(x, name)
                raise KvarnError(f"{name_of(x, graph.nodes)} is still needed when {writer} writes in its place")
        gone |= dict.fromkeys(used_up, name)


def _select(kinds: list[Kind]) -> list[Kind]:
    """With a Select behind the last attention, of the values that are still read."""
    behind = 1 + max(i for i, kind in enumerate(kinds) if isinstance(kind, Attention))
    read = {x for kind in kinds[behind:] for x in reads(kind)}
    made = {x for kind in kinds[:behind] for x in makes(kind)}
    live = sorted(made & read, key=lambda value: value.id)
    return [*kinds[:behind], Select(tuple(live)), *kinds[behind:]]
