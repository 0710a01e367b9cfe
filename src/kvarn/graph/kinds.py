"""What fusion makes of a model: a list of these, in the order in which a backend runs them.

Values are those of the recorded graph. A kind may use up a value: its memory is then free for the kind to write to, and
nobody reads the value afterwards. `reads` and `makes` are all that a backend needs to know when memory can be reused.
"""

from dataclasses import dataclass

from kvarn.graph.ops import Activation, Rope
from kvarn.graph.record import Heads, Value


@dataclass(frozen=True, slots=True)
class Embed:
    out: Value
    weight: str
    scale: float


@dataclass(frozen=True, slots=True)
class Norm:
    """Read by matrices only."""

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
    """A matrix of a product. With `into`: out = into + matrix x + bias, which uses `into` up."""

    out: Value
    matrix: str
    bias: str | None = None
    into: Value | None = None


@dataclass(frozen=True, slots=True)
class Product:
    """All matrices that read x, which is a norm, a gate or attention."""

    x: Value
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Attention:
    """q and k normalized per head, then rotated, where the model does so; k and v written; then attention over the
    cache. Uses up q, k and v."""

    out: Value
    q: Value
    k: Value
    v: Value
    q_norm: str | None
    k_norm: str | None
    rope: Rope | None
    layer: int
    scale: float
    heads: Heads


@dataclass(frozen=True, slots=True)
class Select:
    """From here on there are only the rows that the step asks for. These are the values that are still read."""

    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Gate:
    """activation(gate) * up, read by matrices only. Uses up both."""

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
    """The last one. x is the model's hidden state: the final norm of the rows that the step asks for."""

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
