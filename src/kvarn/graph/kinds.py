"""The kinds: the operations that fusion makes of a model. A backend runs the list in order.

Values are those of the recorded graph. A kind may use up a value: it may write its output into the
value's memory, and no later kind reads the value. `reads` and `makes` tell a backend when it can reuse
memory.
"""

from dataclasses import dataclass

from kvarn.graph.ops import Activation, Centre, Rope
from kvarn.graph.record import Heads, Value


@dataclass(frozen=True, slots=True)
class Embed:
    out: Value
    weight: str
    scale: float


@dataclass(frozen=True, slots=True)
class Norm:
    """Only matrices read the output."""

    out: Value
    x: Value
    weight: str


@dataclass(frozen=True, slots=True)
class NormAdd:
    """out = into + norm(x). Uses up `into` and x."""

    out: Value
    x: Value
    weight: str
    into: Value


@dataclass(frozen=True, slots=True)
class Segment:
    """One matrix of a Product: out = matrix x + bias. With `into`: out = into + matrix x + bias, and `into` is used
    up."""

    out: Value
    matrix: str
    bias: str | None = None
    into: Value | None = None


@dataclass(frozen=True, slots=True)
class Product:
    """All matrices that read x. x is the output of a Norm, a Gate or an Attention."""

    x: Value
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Attention:
    """Normalize q and k per head, rotate them and centre k, each if the model does; write k and v into the cache, then
    attend over the cache. Uses up q, k and v."""

    out: Value
    q: Value
    k: Value
    v: Value
    q_norm: str | None
    k_norm: str | None
    rope: Rope | None
    centre: Centre | None
    layer: int
    scale: float
    heads: Heads


@dataclass(frozen=True, slots=True)
class Select:
    """Keep only the rows that the step asks for, of all values that are read later."""

    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Gate:
    """out = activation(gate) * up. Only matrices read it. Uses up both inputs."""

    out: Value
    gate: Value
    up: Value
    activation: Activation


@dataclass(frozen=True, slots=True)
class Add:
    """out = into + x. Uses up `into`."""

    out: Value
    x: Value
    into: Value


@dataclass(frozen=True, slots=True)
class Logits:
    """The last kind. x is the final hidden state of the rows that the step asks for."""

    x: Value
    weight: str


Kind = Embed | Norm | NormAdd | Product | Attention | Select | Gate | Add | Logits


def reads(kind: Kind) -> tuple[Value, ...]:
    match kind:
        case Norm() | Logits():
            return (kind.x,)
        case NormAdd() | Add():
            return kind.x, kind.into
        case Product():
            return kind.x, *(s.into for s in kind.segments if s.into is not None)
        case Attention():
            return kind.q, kind.k, kind.v
        case Gate():
            return kind.gate, kind.up
        case Embed() | Select():
            return ()


def makes(kind: Kind) -> tuple[Value, ...]:
    match kind:
        case Product():
            return tuple(segment.out for segment in kind.segments)
        case Select() | Logits():
            return ()
        case _:
            return (kind.out,)


def uses_up(kind: Kind) -> tuple[Value, ...]:
    match kind:
        case Product():
            return reads(kind)[1:]
        case Add():
            return (kind.into,)
        case NormAdd() | Attention() | Gate():
            return reads(kind)
        case _:
            return ()
