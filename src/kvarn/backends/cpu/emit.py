"""Emits a native program from a model's fused graph. Decides about buffers and about rounded inputs.

- The inputs of a matrix are rounded to the form that the matrix multiplies with: int8 codes or bf16.
  Norms and gates round their own outputs. A separate operation rounds the outputs of attention.
- After the last read of a value, its buffer is used for another value of the same width. Sums and
  gates are computed in place.

Only one set of rounded inputs exists at a time, so a product directly follows the operation that
rounds its inputs. Non-goal: deciding what is fused (graph/fuse.py).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvarn import native
from kvarn.arrays import Floats
from kvarn.errors import KvarnError
from kvarn.graph import kinds
from kvarn.graph.kinds import Kind
from kvarn.graph.ops import Rope
from kvarn.graph.record import Value
from kvarn.models.centre import centre_vector
from kvarn.models.rope import frequencies, magnitude


@dataclass(frozen=True, slots=True)
class Weights:
    matrices: Mapping[str, native.PackedMatrix]
    vectors: Mapping[str, Floats]  # norms and biases


def emit(fused: Sequence[Kind], norm_eps: float, weights: Weights, program: native.Program) -> None:
    emitter = _Emitter(fused, norm_eps, weights, program)
    for kind in fused:
        emitter.emit(kind)


class _Emitter:
    def __init__(self, fused: Sequence[Kind], norm_eps: float, weights: Weights, program: native.Program) -> None:
        self.eps, self.weights, self.program = norm_eps, weights, program
        self.left = Counter(x for kind in fused for x in kinds.reads(kind))  # reads that are not emitted yet
        self.matrices: dict[Value, list[native.PackedMatrix]] = {}  # value -> matrices that read it
        for kind in fused:
            if isinstance(kind, kinds.Product):
                self.matrices[kind.x] = [weights.matrices[s.matrix] for s in kind.segments]
            elif isinstance(kind, kinds.Logits):
                self.matrices.setdefault(kind.x, []).append(weights.matrices[kind.weight])
        self.buffers: dict[Value, int] = {}
        self.free: dict[int, list[int]] = {}  # width -> buffers whose value is not read any more
        self.ropes: dict[Rope, int] = {}
        self.attended: dict[Value, int] = {}  # outputs of attention -> layer
        self.rounded: Value | None = None  # the value whose rounded rows are current
        self.wanted_rows_only = False

    def emit(self, kind: Kind) -> None:
        match kind:
            case kinds.Embed():
                out = self._buffer(kind.out)
                self.program.embed(kind.weight, self.weights.matrices[kind.weight], out, kind.scale)
            case kinds.Norm():
                source, out = self._read(kind.x), self._buffer(kind.out)
                weight, forms = self.weights.vectors[kind.weight], self._input_forms(kind.out)
                self.program.norm_round(kind.weight, self.wanted_rows_only, source, out, weight, self.eps, *forms)
            case kinds.NormAdd():
                source, out = self._read(kind.x), self._replace(kind.into, kind.out)
                weight = self.weights.vectors[kind.weight]
                self.program.norm_add(kind.weight, self.wanted_rows_only, source, out, weight, self.eps)
            case kinds.Product():
                self._product(kind)
            case kinds.Attention():
                self._attention(kind)
            case kinds.Select():
                self._select(kind)
            case kinds.Gate():
                gate, up = self._replace(kind.gate, kind.out), self._read(kind.up)
                name, activation, forms = (
                    f"gate {kind.out.id}",
                    native.Gate[kind.activation],
                    self._input_forms(kind.out),
                )
                self.program.gated(name, self.wanted_rows_only, gate, up, gate, activation, *forms)
            case kinds.Add():
                source, out = self._read(kind.x), self._replace(kind.into, kind.out)
                self.program.add(f"add {kind.out.id}", self.wanted_rows_only, source, out)
            case kinds.Logits():
                self._round(kind.x)
                self._read(kind.x)
                segment = (self.weights.matrices[kind.weight], None, -1, False)
                self.program.linear("logits", self.wanted_rows_only, True, [segment])

    # -- buffers -------------------------------------------------------------------------------------------------

    def _buffer(self, value: Value) -> int:
        free = self.free.get(value.width)
        self.buffers[value] = free.pop() if free else self.program.buffer(value.width)
        return self.buffers[value]

    def _read(self, value: Value) -> int:
        """The buffer of a value, for one read. After the last read the buffer is free."""
        self.left[value] -= 1
        if self.left[value]:
            return self.buffers[value]
        return self._release(value)

    def _release(self, value: Value) -> int:
        buffer = self.buffers.pop(value)
        self.free.setdefault(value.width, []).append(buffer)
        return buffer

    def _replace(self, value: Value, by: Value) -> int:
        """The buffer of a value that is not read again; `by` takes it over."""
        self.buffers[by] = self.buffers.pop(value)
        return self.buffers[by]

    # -- forms ---------------------------------------------------------------------------------------------------

    def _input_forms(self, value: Value) -> tuple[bool, bool]:
        """(needs_int8, needs_bf16) of the matrices that read this value."""
        self.rounded = value
        readers = self.matrices.get(value, [])
        return any(w.integer for w in readers), any(w.kind == "BF16" for w in readers)

    def _round(self, value: Value) -> None:
        """Norms and gates have rounded their rows; round the rows of attention before a product reads them."""
        if value in self.attended:
            buffer, forms = self.buffers[value], self._input_forms(value)
            self.program.norm_round(
                f"round {self.attended.pop(value)}", self.wanted_rows_only, buffer, buffer, None, 0.0, *forms
            )
        if self.rounded != value:
            raise KvarnError("a product reads rows that are no longer the last ones rounded: no program for that")

    # -- operations ----------------------------------------------------------------------------------------------

    def _product(self, kind: kinds.Product) -> None:
        self._round(kind.x)
        segments = []
        for s in kind.segments:
            out = self._buffer(s.out) if s.into is None else self._replace(s.into, s.out)
            bias = None if s.bias is None else self.weights.vectors[s.bias]
            segments.append((self.weights.matrices[s.matrix], bias, out, s.into is not None))
        self._read(kind.x)
        names = "+".join(s.matrix.removesuffix(".weight") for s in kind.segments)
        self.program.linear(names, self.wanted_rows_only, False, segments)

    def _attention(self, kind: kinds.Attention) -> None:
        q_norm, k_norm = (None if norm is None else self.weights.vectors[norm] for norm in (kind.q_norm, kind.k_norm))
        rope = -1 if kind.rope is None else self._rope_table(kind.rope)
        centre = None
        if kind.centre is not None:
            centre = centre_vector(kind.centre, self.weights.vectors[kind.centre.bias], kind.heads.n_kv_heads)
        out = self._buffer(kind.out)  # before q, k and v are released: threads read them while others write
        q, k, v = (self._read(x) for x in (kind.q, kind.k, kind.v))
        name, layer, scale, eps = f"attention {kind.layer}", kind.layer, kind.scale, self.eps
        self.program.attention(name, layer, q, k, v, out, scale, rope, kind.heads, q_norm, k_norm, centre, eps)
        self.attended[kind.out] = kind.layer

    def _rope_table(self, rope: Rope) -> int:
        if rope not in self.ropes:
            self.ropes[rope] = self.program.rope(frequencies(rope).tolist(), magnitude(rope))
        return self.ropes[rope]

    def _select(self, kind: kinds.Select) -> None:
        for value in kind.values:
            source = self.buffers[value]
            fresh = self._buffer(value)
            self.program.select(f"select {value.id}", source, fresh)
            self.free.setdefault(value.width, []).append(source)
        self.wanted_rows_only, self.rounded = True, None
