"""What the parser finds, in order. However the text was cut, joining neighbours of a kind gives the same list."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class CallBegin:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    index: int
    text: str  # a part of a JSON object's text


@dataclass(frozen=True)
class CallEnd:
    index: int
    complete: bool = True  # False: the call broke after its begin. Its arguments are the beginning of a JSON text only


@dataclass(frozen=True)
class Malformed:
    """A call that cannot be read. `text` is all that the model wrote of it. If its CallBegin was already sent, `index`
    is its number, and CallEnd(index, complete=False) follows."""

    text: str
    error: str
    index: int | None = None


Delta = Reasoning | Content | CallBegin | CallArguments | CallEnd | Malformed


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The same with neighbours of the same kind as one."""
    result: list[Delta] = []
    for _, group in groupby(enumerate(deltas), _kind):
        first, *rest = (delta for _, delta in group)
        if rest and isinstance(first, Reasoning | Content | CallArguments):
            texts = [delta.text for delta in (first, *rest) if isinstance(delta, Reasoning | Content | CallArguments)]
            first = replace(first, text="".join(texts))
        result.append(first)
    return result


def _kind(numbered: tuple[int, Delta]) -> tuple[type, int]:
    number, delta = numbered
    if isinstance(delta, CallArguments):
        return CallArguments, delta.index
    return type(delta), 0 if isinstance(delta, Reasoning | Content) else number
