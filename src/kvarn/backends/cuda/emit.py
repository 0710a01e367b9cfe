"""Emits the launches of a model from its fused graph. Decides about memory and about forms.

- A value that only matrices read exists in the forms of these matrices: norms, gates and attention write
  it so. The output of the last attention is f32 until the wanted rows are selected.
- Matrices that read one value and are stored alike are one product. Its outputs lie side by side.
- After the last read of a value, its rows hold another one of the same shape. Everything runs in the
  order of the list, so no launch overwrites what an earlier one still reads.

Non-goal: deciding what is fused (graph/fuse.py).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import tau
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from kvarn.backends.cuda import specs
from kvarn.backends.cuda.buffers import Allocation, Rows, View, Workspace
from kvarn.backends.cuda.driver import Device
from kvarn.backends.cuda.inbox import Frame
from kvarn.backends.cuda.memory import CudaMemory, query_width
from kvarn.backends.cuda.products import Gating, Products
from kvarn.backends.cuda.specs import Kernel
from kvarn.backends.cuda.weights import Matrix, Weights
from kvarn.cache.spec import ceil_div
from kvarn.errors import KvarnError
from kvarn.graph import kinds
from kvarn.graph.kinds import Kind
from kvarn.graph.ops import Centre, Rope
from kvarn.graph.record import Value
from kvarn.models.centre import centre_vector
from kvarn.models.rope import frequencies, magnitude

ALIGNED = 4  # numbers: kernels are compiled for addresses that are multiples of 16 bytes
Run = Callable[[CudaMemory, Frame], None]


class Input(NamedTuple):
    """An array of the step, by its name in Frame."""

    name: str


Argument = int | float | Rows | View | Input


def resolved(arg: Argument, frame: Frame) -> int | float:
    """The number that a kernel takes."""
    if isinstance(arg, int | float):
        return arg
    return getattr(frame, arg.name) if isinstance(arg, Input) else arg.address


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    run: Run
    kernel: str | None = None  # of attention: `prefill` or `decode`


@dataclass(frozen=True, slots=True)
class Hidden:
    """The norm that makes the final hidden states."""

    x: View
    weight: int
    eps: float

    def launch(self, driver: Device, n_rows: int, out: int) -> None:
        """In f32, of the wanted rows."""
        widths = (self.x.width, self.x.stride, self.x.width)
        args = (self.x.address, self.weight, out, *widths, self.eps, specs.FORM_CODES["f32"])
        driver.launch(driver.function(specs.norm()), (n_rows, 1, 1), args)


@dataclass(slots=True)
class Emitted:
    """A program: operations in order, then logits from `last`, or the hidden states before them."""

    operations: list[Operation]
    workspace: Workspace
    products: Products
    last: Rows  # the input of the logits
    logits: Matrix
    hidden: Hidden
    kept: list[Allocation]  # constants that the operations read


def emit(fused: Sequence[Kind], norm_eps: float, weights: Weights, driver: Device) -> Emitted:
    emitter = _Emitter(fused, norm_eps, weights, driver)
    for kind in fused:
        emitter.emit(kind)
    return emitter.emitted()


def _alone(segment: kinds.Segment) -> str:
    """What distinguishes a segment that has rows of its own: a sum, or one that would misalign the next."""
    return segment.matrix if segment.into or segment.out.width % ALIGNED else ""


def _name(segments: Sequence[kinds.Segment]) -> str:
    return "+".join(s.matrix.removesuffix(".weight") for s in segments)


class _Emitter:
    def __init__(self, fused: Sequence[Kind], norm_eps: float, weights: Weights, driver: Device) -> None:
        self.eps, self.weights, self.driver = norm_eps, weights, driver
        self.workspace, self.products = Workspace(driver), Products(driver)
        self.operations: list[Operation] = []
        self.kept: list[Allocation] = []
        self.left = Counter(x for kind in fused for x in kinds.reads(kind))  # reads that are not emitted yet
        self.forms: dict[Value, list[str]] = {}  # of the matrices that read a value
        for kind in fused:
            if isinstance(kind, kinds.Product):
                self.forms[kind.x] = list(dict.fromkeys(weights.form(s.matrix) for s in kind.segments))
            elif isinstance(kind, kinds.Logits):
                self.forms[kind.x] = [weights.form(kind.weight)]
        self.gates = {kind.gate: kind for kind in fused if isinstance(kind, kinds.Gate)}
        self.narrowed = {x for kind in fused if isinstance(kind, kinds.Select) for x in kind.values}
        self.views: dict[Value, View] = {}  # values in f32
        self.formed: dict[Value, dict[str, Rows]] = {}  # values in the forms of matrices
        self.scaled: dict[Value, float] = {}  # by what the outputs of a product of this value are multiplied
        self.users: Counter[Rows] = Counter()  # values in these rows that are still read
        self.free: dict[tuple[str, int, bool], list[Rows]] = {}
        self.ropes: dict[Rope, tuple[Rows, Rows]] = {}
        self.selected = False
        self.final: tuple[Value, Hidden] | None = None
        self.end: tuple[Rows, Matrix] | None = None

    def emitted(self) -> Emitted:
        assert self.end is not None
        assert self.final is not None
        self.products.reserve(self.weights.matrices)
        return Emitted(self.operations, self.workspace, self.products, *self.end, self.final[1], self.kept)

    def emit(self, kind: Kind) -> None:
        match kind:
            case kinds.Embed():
                self._embed(kind)
            case kinds.Norm():
                self._norm(kind)
            case kinds.NormAdd():
                self._norm_add(kind)
            case kinds.Product():
                self._product(kind)
            case kinds.Attention():
                self._attention(kind)
            case kinds.Select():
                self._select(kind)
            case kinds.Gate():
                self._gate(kind)
            case kinds.Add():
                self._add(kind)
            case kinds.Logits():
                if self.final is None or self.final[0] != kind.x:
                    raise KvarnError("the model's logits do not read a norm: the cuda backend cannot run it")
                (form,) = self.forms[kind.x]
                self.end = self.formed[kind.x][form], self.weights.matrix(kind.weight)

    # -- memory ----------------------------------------------------------------------------------------------------

    def _rows(self, form: str, width: int, padded: bool, users: int) -> Rows:
        free = self.free.get((form, width, padded))
        rows = free.pop() if free else self.workspace.add(form, width, padded)
        self.users[rows] = users
        return rows

    def _view(self, value: Value) -> View:
        """New f32 rows for a value."""
        self.views[value] = View(self._rows("f32", value.width, False, 1), 0, value.width)
        return self.views[value]

    def _read(self, value: Value) -> View:
        """A value, for one read. After the last read its rows are free."""
        view = self.views[value]
        self.left[value] -= 1
        if not self.left[value]:
            del self.views[value]
            self._leave(view.rows)
        return view

    def _leave(self, rows: Rows) -> None:
        self.users[rows] -= 1
        if not self.users[rows]:
            self.free.setdefault((rows.form, rows.width, rows.padded), []).append(rows)

    def _replace(self, value: Value, by: Value) -> View:
        """`by` takes over the rows of a value that is not read again."""
        self.views[by] = self.views.pop(value)
        return self.views[by]

    # -- forms -----------------------------------------------------------------------------------------------------

    def _outputs(self, value: Value) -> list[Rows]:
        """Rows for a value in each form in which matrices read it."""
        self.formed[value] = {form: self._rows(form, value.width, True, 1) for form in self.forms[value]}
        return list(self.formed[value].values())

    def _close(self, value: Value) -> None:
        """The product that reads a value was emitted: its forms are free."""
        for rows in self.formed.pop(value).values():
            self._leave(rows)

    # -- launches --------------------------------------------------------------------------------------------------

    def _count(self) -> Callable[[Frame], int]:
        """How many rows the operations compute from here on."""
        return attrgetter("n_wanted" if self.selected else "n_tokens")

    def _launch(self, name: str, kernel: Kernel, args: Sequence[Argument], width: int = 1) -> None:
        """A program per row and stretch of columns. Addresses are asked for at each launch, because a larger step moves
        the workspace."""
        driver, function, count = self.driver, self.driver.function(kernel), self._count()
        columns = ceil_div(width, specs.STRETCH)

        def run(memory: CudaMemory, frame: Frame) -> None:
            if n_rows := count(frame):  # a step that ends inside of a prompt wants no row
                driver.launch(function, (n_rows, columns, 1), [resolved(arg, frame) for arg in args])

        self.operations.append(Operation(name, run))

    # -- operations ------------------------------------------------------------------------------------------------

    def _embed(self, kind: kinds.Embed) -> None:
        matrix, out = self.weights.matrix(kind.weight), self._view(kind.out)
        planes, ids = matrix.planes, (Input("tokens"), Input("sampled"))
        if planes is None:
            form = specs.FORM_CODES[matrix.form]
            args = (*ids, matrix.address, out, out.width, matrix.depth, kind.scale, form)
            self._launch(kind.weight, specs.embed(), args, out.width)
            return
        shape = (planes.bits, planes.field, int(planes.offsets), planes.blocks, planes.span, planes.tiles, planes.words)
        places = (*ids, matrix.address, matrix.headers, out, out.width, matrix.padded, matrix.units)
        self._launch(kind.weight, specs.embed_packed(), (*places, *shape, kind.scale * matrix.scale), out.width)

    def _norm(self, kind: kinds.Norm) -> None:
        x, weight = self._read(kind.x), self.weights.vector(kind.weight)
        for out in self._outputs(kind.out):
            args = (x, weight, out, x.width, x.stride, out.stride, self.eps, specs.FORM_CODES[out.form])
            self._launch(kind.weight, specs.norm(), args)
        self.final = kind.out, Hidden(x, weight, self.eps)

    def _norm_add(self, kind: kinds.NormAdd) -> None:
        x, into = self._read(kind.x), self._replace(kind.into, kind.out)
        args = (x, self.weights.vector(kind.weight), into, x.width, x.stride, into.stride, self.eps)
        self._launch(kind.weight, specs.norm_add(), args)

    def _add(self, kind: kinds.Add) -> None:
        x, into = self._read(kind.x), self._replace(kind.into, kind.out)
        self._launch(f"add {kind.out.id}", specs.add(), (x, into, x.width, x.stride, into.stride), x.width)

    def _product(self, kind: kinds.Product) -> None:
        for _, found in groupby(kind.segments, key=lambda s: (self.weights.product(s.matrix), _alone(s))):
            segments = list(found)
            form = self.weights.form(segments[0].matrix)
            if (gate := self._gate_of(segments)) is not None:
                self._gated(self.formed[kind.x][form], segments, gate, self.scaled.get(kind.x, 1.0))
                continue
            if segments[0].into is not None:
                out = self._replace(segments[0].into, segments[0].out)
            else:
                out = self._side_by_side([s.out for s in segments])
            self._linear(self.formed[kind.x][form], segments, out, self.scaled.get(kind.x, 1.0))
        self._close(kind.x)

    def _side_by_side(self, values: Sequence[Value]) -> View:
        width = sum(value.width for value in values)
        rows, column = self._rows("f32", width, False, len(values)), 0
        for value in values:
            self.views[value] = View(rows, column, value.width)
            column += value.width
        return View(rows, 0, width)

    def _linear(self, x: Rows, segments: Sequence[kinds.Segment], out: View, scale: float) -> None:
        matrix = self.weights.matrix(*(s.matrix for s in segments))
        biased = any(s.bias for s in segments)
        bias = self.weights.vectors(*((s.bias, s.out.width) for s in segments)) if biased else 0
        adds = int(segments[0].into is not None)
        products, count = self.products, self._count()

        def run(memory: CudaMemory, frame: Frame) -> None:
            products.launch(x.address, matrix, out.address, out.stride, count(frame), bias, adds, scale)

        self.operations.append(Operation(_name(segments), run))

    def _gate_of(self, segments: Sequence[kinds.Segment]) -> kinds.Gate | None:
        """The gate that the product of these matrices can do itself."""
        gate = self.gates.get(segments[0].out)
        if gate is None or [s.out for s in segments] != [gate.gate, gate.up] or len(self.forms[gate.out]) != 1:
            return None
        fits = Gating.fits(self.weights.matrix(*(s.matrix for s in segments)))
        return gate if fits and not any(s.bias for s in segments) else None

    def _gated(self, x: Rows, segments: Sequence[kinds.Segment], kind: kinds.Gate, scale: float) -> None:
        """A product of gate and up whose output is that of the gate."""
        matrix = self.weights.matrix(*(s.matrix for s in segments))
        factor, (out,) = self._factor(kind), self._outputs(kind.out)
        gate = Gating(specs.ACTIVATION_CODES[kind.activation], specs.FORM_CODES[out.form], factor)
        products, count = self.products, self._count()

        def run(memory: CudaMemory, frame: Frame) -> None:
            products.launch(x.address, matrix, out.address, out.stride, count(frame), scale=scale, gate=gate)

        self.operations.append(Operation(_name(segments), run))

    def _factor(self, kind: kinds.Gate) -> float:
        """What the output of a gate is multiplied by, in all its forms. The product that reads it undoes that."""
        factor = min(specs.GATE_SCALE[form] for form in self.forms[kind.out])
        self.scaled[kind.out] = 1 / factor
        return factor

    def _gate(self, kind: kinds.Gate) -> None:
        if kind.out in self.formed:  # a product did it
            return
        gate, up, factor = self._read(kind.gate), self._read(kind.up), self._factor(kind)
        activation = specs.ACTIVATION_CODES[kind.activation]
        for out in self._outputs(kind.out):
            strides, form = (gate.stride, up.stride, out.stride), specs.FORM_CODES[out.form]
            args = (gate, up, out, gate.width, *strides, factor, activation, form)
            self._launch(f"gate {kind.out.id}", specs.gate(), args, gate.width)

    def _attention(self, kind: kinds.Attention) -> None:
        if len(self.forms.get(kind.out, ())) != 1:
            raise KvarnError("the model's attention is not read by one matrix: the cuda backend cannot run it")
        # Before q, k and v are read: their rows are still in use.
        (out,) = [self._view(kind.out).rows] if kind.out in self.narrowed else self._outputs(kind.out)
        n_heads = kind.heads[0]
        queries = self._rows("f32", query_width(n_heads, kind.q.width // n_heads), False, 1)  # in any type
        qkv = [self._read(x) for x in (kind.q, kind.k, kind.v)]
        self._leave(queries)
        norms = tuple(0 if norm is None else self.weights.vector(norm) for norm in (kind.q_norm, kind.k_norm))
        centre = 0 if kind.centre is None else self._centre(kind.centre, kind.heads.n_kv_heads)
        tables = None if kind.rope is None else self._angles(kind.rope)
        half = 0 if kind.rope is None else kind.rope.dim // 2
        heads, layer, eps, scale = kind.heads, kind.layer, self.eps, kind.scale

        def store(memory: CudaMemory, frame: Frame) -> None:
            rope = (0, 0, 0) if tables is None else (tables[0].address, tables[1].address, half)
            vectors = norms[0], norms[1], centre
            memory.store(layer, frame, (heads[0], heads[1]), qkv, vectors, rope, eps, queries.address)

        def prefill(memory: CudaMemory, frame: Frame) -> None:
            memory.prefill(layer, frame, queries.address, out, scale)

        def decode(memory: CudaMemory, frame: Frame) -> None:
            memory.decode(layer, frame, queries.address, out, scale)

        def keep(memory: CudaMemory, frame: Frame) -> None:
            memory.keep(layer, frame)

        self.operations.append(Operation(f"store {layer}", store))
        self.operations.append(Operation(f"prefill {layer}", prefill, "prefill"))
        self.operations.append(Operation(f"decode {layer}", decode, "decode"))
        self.operations.append(Operation(f"keep {layer}", keep))

    def _centre(self, centre: Centre, heads: int) -> int:
        vector = centre_vector(centre, self.weights.tensor(centre.bias), heads)
        memory = Allocation(self.driver, vector.nbytes)
        self.driver.upload(memory.address, vector)
        self.kept.append(memory)
        return memory.address

    def _angles(self, rope: Rope) -> tuple[Rows, Rows]:
        """Cosines and sines of the step's tokens, computed once per step."""
        if rope in self.ropes:
            return self.ropes[rope]
        half = rope.dim // 2
        cos, sin = self.ropes[rope] = self._rows("f32", half, False, 1), self._rows("f32", half, False, 1)
        turns = Allocation(self.driver, 8 * half)
        self.driver.upload(turns.address, np.ascontiguousarray(frequencies(rope) / tau, np.float64))
        self.kept.append(turns)
        args = (Input("positions"), turns.address, cos, sin, half, magnitude(rope))
        self._launch("angles", specs.angles(), args)
        return cos, sin

    def _select(self, kind: kinds.Select) -> None:
        self.selected = True
        for value in kind.values:
            old = self.views.pop(value)
            for new in self._outputs(value) if value in self.forms else [self._view(value).rows]:
                code = specs.FORM_CODES[new.form]
                args = (Input("wanted"), old, new, old.width, old.stride, new.stride, code)
                self._launch(f"select {value.id}", specs.select(), args, old.width)
            self._leave(old.rows)
