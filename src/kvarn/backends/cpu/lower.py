"""From recorded nodes to a native program, fused where it pays.

- A norm, a gate or an attention that feeds matrices also rounds its rows to the forms that they read.
- Matrices with the same input are one operation (q, k and v; gate and up), whatever their types.
- A sum whose one side is a matrix's fresh output is done by the matrix; a norm followed by a sum is one operation.
- Norms and rotations of heads, and the write into the cache, happen inside attention.
- Past the last attention only the rows that the caller asks for are computed.

Rows are independent everywhere but in attention, so none of this changes a bit. Non-goal: graphs that no model has;
what does not fit is refused when the model is loaded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvarn import isa
from kvarn.backends.cpu.ops import Node
from kvarn.cache.codec import Floats
from kvarn.errors import KvarnError
from kvarn.graph.ops import Rope
from kvarn.models.config import ModelConfig
from kvarn.models.rope import frequencies, magnitude

GATES = {"silu": 0, "gelu": 1}


@dataclass(frozen=True, slots=True)
class Weights:
    matrices: Mapping[str, isa.Weight]
    vectors: Mapping[str, Floats]  # norms and biases


class Lowering:
    def __init__(self, nodes: Sequence[Node], config: ModelConfig, weights: Weights, program: isa.Program) -> None:
        self.nodes, self.config, self.weights, self.program = nodes, config, weights, program
        self.users: list[list[int]] = [[] for _ in nodes]
        for index, node in enumerate(nodes):
            for source in node.inputs:
                self.users[source].append(index)
        self.buffers: dict[int, int] = {}  # node -> buffer
        self.free: dict[int, list[int]] = {}  # width -> buffers that nobody reads any more
        self.widths: dict[int, int] = {}  # buffer -> width
        self.left = [len(users) for users in self.users]
        self.ropes: dict[Rope, int] = {}
        self.done: set[int] = set()
        self.last_attention = max(i for i, node in enumerate(nodes) if node.op == "attention")
        self.selected = False

    def run(self) -> None:
        for index, node in enumerate(self.nodes):
            if index in self.done:
                continue
            handler: Callable[[int, Node], None] = getattr(self, f"_{node.op}")
            handler(index, node)
            self.done.add(index)

    # -- buffers -------------------------------------------------------------------------------------------------

    def _buffer(self, width: int) -> int:
        if free := self.free.get(width):
            return free.pop()
        made = self.program.buffer(width)
        self.widths[made] = width
        return made

    def _read(self, index: int) -> int:
        """The buffer of a node that is read once more; it is free again after the last reader."""
        self.left[index] -= 1
        buffer = self.buffers[index]
        if self.left[index] == 0 and buffer not in [b for i, b in self.buffers.items() if self.left[i] > 0]:
            self.free.setdefault(self.widths[buffer], []).append(buffer)
        return buffer

    def _only_user(self, index: int, op: str) -> int | None:
        users = self.users[index]
        return users[0] if len(users) == 1 and self.nodes[users[0]].op == op else None

    def _forms(self, index: int) -> tuple[bool, bool]:
        """Whether the matrices that read this node, and nobody else may, want int8 codes, and bf16."""
        readers = [self.nodes[user] for user in self.users[index]]
        if any(reader.op not in ("linear", "logits") for reader in readers):
            raise KvarnError("a model reads a norm or a gate other than by a matrix: no program for that")
        kinds = [self.weights.matrices[reader.weights[0]] for reader in readers]
        return any(w.integer for w in kinds), any(w.kind == "BF16" for w in kinds)

    # -- operations ----------------------------------------------------------------------------------------------

    def _embed(self, index: int, node: Node) -> None:
        out = self.buffers[index] = self._buffer(self.config.hidden)
        self.program.embed(node.weights[0], self.weights.matrices[node.weights[0]], out, node.settings[0])

    def _rms_norm(self, index: int, node: Node) -> None:
        if self._only_user(index, "rope") is not None:
            return  # of heads: attention does it
        weight, eps = self.weights.vectors[node.weights[0]], self.config.norm_eps
        add = self._only_user(index, "add")
        if add is not None:  # a norm after a half of a layer
            target = next(i for i in self.nodes[add].inputs if i != index)
            source = self._read(node.inputs[0])
            self.program.norm_add(node.weights[0], self.selected, source, self._into(target, add), weight, eps)
            return
        source = self._read(node.inputs[0])
        out = self.buffers[index] = self._buffer(self.config.hidden)
        self.program.prepare(node.weights[0], self.selected, source, out, weight, eps, *self._forms(index))

    def _into(self, target: int, add: int) -> int:
        """The buffer of an addend that nobody else reads: the sum takes its place."""
        if self.left[target] != 1:
            raise KvarnError("a model adds to a value that is still needed: no program for that")
        self.left[target] -= 1
        self.buffers[add] = self.buffers[target]
        self.done.add(add)
        return self.buffers[add]

    def _linear(self, index: int, node: Node) -> None:
        source = node.inputs[0]
        group = [i for i in self.users[source] if self.nodes[i].op == "linear"]
        segments = []
        for i in group:
            matrix, *bias = self.nodes[i].weights
            add = self._only_user(i, "add")
            packed = self.weights.matrices[matrix]
            if add is not None:
                out = self._into(next(t for t in self.nodes[add].inputs if t != i), add)
            else:
                out = self.buffers[i] = self._buffer(packed.rows)
            segments.append((packed, self.weights.vectors[bias[0]] if bias else None, out, add is not None))
        for _ in group:
            self._read(source)
        self.done.update(group)
        names = "+".join(self.nodes[i].weights[0].removesuffix(".weight") for i in group)
        self.program.linear(names, self.selected, False, segments)

    def _rope(self, index: int, node: Node) -> None:
        pass  # attention does it

    def _heads(self, index: int) -> tuple[int, Floats | None, int]:
        """What attention does to q or k before it is used: (the matrix's node, its norm, its rope)."""
        norm, rope = None, -1
        while (node := self.nodes[index]).op in ("rope", "rms_norm"):
            if node.op == "rope":
                rope = self._rope_table(node.settings[1])
            else:
                norm = self.weights.vectors[node.weights[0]]
            index = node.inputs[0]
        return index, norm, rope

    def _rope_table(self, rope: Rope) -> int:
        if rope not in self.ropes:
            self.ropes[rope] = self.program.rope(frequencies(rope).tolist(), magnitude(rope))
        return self.ropes[rope]

    def _attention(self, index: int, node: Node) -> None:
        layer, scale = node.settings
        (q, q_norm, rope), (k, k_norm, k_rope) = self._heads(node.inputs[0]), self._heads(node.inputs[1])
        assert rope == k_rope
        v = node.inputs[2]
        buffers = self.buffers[q], self.buffers[k], self.buffers[v]
        out = self._buffer(self.config.n_heads * self.config.head_dim)
        shape = (self.config.n_heads, self.config.n_kv_heads, self.config.head_dim)
        name = f"attention {layer}"
        self.program.attention(name, layer, *buffers, out, scale, rope, shape, q_norm, k_norm, self.config.norm_eps)
        for i in (q, k, v):
            self._read(i)
        self.buffers[index] = out
        if index == self.last_attention:
            self._select(index)
        out = self.buffers[index]
        self.program.prepare(f"round {layer}", self.selected, out, out, None, 0.0, *self._forms(index))

    def _select(self, attention: int) -> None:
        """From here on only the wanted rows: of attention's output and of what it will be added to."""
        live = [i for i in range(attention) if self.left[i] > 0 and i in self.buffers]
        for i in (*live, attention):
            source = self.buffers[i]
            self.buffers[i] = self._buffer(self.widths[source])
            self.program.select(f"select {i}", source, self.buffers[i])
            self.free.setdefault(self.widths[source], []).append(source)
        self.selected = True

    def _gated(self, index: int, node: Node) -> None:
        gate, up = (self._read(i) for i in node.inputs)
        out = self.buffers[index] = gate
        if gate in (free := self.free[self.widths[gate]]):
            free.remove(gate)
        self.program.gated(f"gate {index}", self.selected, gate, up, out, GATES[node.settings[0]], *self._forms(index))

    def _add(self, index: int, node: Node) -> None:
        x, y = node.inputs
        source = self._read(y)
        self.program.add(f"add {index}", self.selected, source, self._into(x, index))

    def _logits(self, index: int, node: Node) -> None:
        self._read(node.inputs[0])
        matrix = self.weights.matrices[node.weights[0]]
        self.program.linear("logits", self.selected, True, [(matrix, None, -1, False)])


def lower(nodes: Sequence[Node], config: ModelConfig, weights: Weights, program: isa.Program) -> None:
    Lowering(nodes, config, weights, program).run()
