"""Quotes the texts of a conversation, so that no control token comes from them.

A chat template mixes its own text with texts from outside. Before it runs, every character of these texts
that begins or ends a control token is replaced by a stand-in, which is a character that nobody uses. The
template moves stand-ins like other characters. The encoder matches control tokens first, and only then
turns stand-ins back into characters. So both ends of a recognized control token come from the template.
This holds for every template, also if it deletes, joins or cuts texts.

Two kinds of text stay as they are, if no control token can overlap them: tokens that are matched in any
text (<think>), and strings in the template's source, which it may search for ('</think>' in content).
Limits: a token with only its middle from outside counts as the template's ('<|' + role + '|>'). A template
that looks for the single character '<', or escapes it for HTML, does not find it.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

from kvarn import native
from kvarn.errors import KvarnError

StandIns = Mapping[str, str]  # what stands in the text, and what it stands for
NO_STAND_INS: StandIns = {}

_LONGEST = 256  # characters of a text that stays as it is; templates search for short ones
# Noncharacters, then private characters.
_CANDIDATES = ((0xFDD0, 0xFDF0), (0xE000, 0xF900), (0xF0000, 0xFFFFE), (0x100000, 0x10FFFE))


class Quoted(NamedTuple):
    values: Any  # what was given, with stand-ins
    stand_ins: StandIns  # empty: nothing was replaced


class Quotes(Protocol):
    def quote(self, values: Any) -> Quoted: ...


class Unquoted:
    """For trusted texts: control tokens are recognized in them."""

    def quote(self, values: Any) -> Quoted:
        return Quoted(values, NO_STAND_INS)


class Quoting:
    def __init__(self, control: Iterable[str], plain: Iterable[str], template: Iterable[str]) -> None:
        """`plain`: tokens that are matched in any text. `template`: the strings in the template's source."""
        tokens = {text for text in control if text}
        self._template = tuple(template)
        self._ends = sorted({text[0] for text in tokens} | {text[-1] for text in tokens})
        overlaps = _overlaps(tokens)
        short = {text for text in (*plain, *self._template) if len(text) <= _LONGEST}
        whole = [text for text in short if any(end in text for end in self._ends) and not overlaps(text)]
        n = len(whole)
        self._whole = native.Markers(whole, list(range(n)), [True] * n, [False] * n)

    def quote(self, values: Any) -> Quoted:
        """`values` is made of dictionaries, lists, texts, numbers and None."""
        try:
            texts = list(texts_of(values))
            used = [end for end in self._ends if any(end in text for text in texts)]
            if not used:
                return Quoted(values, NO_STAND_INS)
            stand_ins = dict(zip(unused((*texts, *self._template)), used, strict=False))
            if len(stand_ins) < len(used):
                raise KvarnError("the messages use all private characters of Unicode: remove one of them")
            quoted = _mapped(values, lambda text: self._quoted(text, stand_ins))
        except RecursionError:
            raise KvarnError("the messages are nested too deeply: give fewer levels of lists and objects") from None
        # JSON in ASCII has escapes instead of stand-ins.
        escapes = {_escape(stand_in): _escape(end) for stand_in, end in stand_ins.items()}
        return Quoted(quoted, stand_ins | escapes)

    def _quoted(self, text: str, stand_ins: StandIns) -> str:
        if not any(end in text for end in stand_ins.values()):
            return text
        raw = text.encode("utf-8", "surrogatepass")
        parts = []
        for id, begin, end in self._whole.split(raw, False):
            part = raw[begin:end].decode("utf-8", "surrogatepass")
            if id < 0:
                for stand_in, character in stand_ins.items():
                    part = part.replace(character, stand_in)
            parts.append(part)
        return "".join(parts)


def n_characters(values: Any) -> int:
    """Of all texts in what `quote` takes."""
    try:
        return sum(map(len, texts_of(values)))
    except RecursionError:
        raise KvarnError("the messages are nested too deeply: give fewer levels of lists and objects") from None


def restored(text: str, stand_ins: StandIns) -> str:
    for stand_in, end in stand_ins.items():
        text = text.replace(stand_in, end)
    return text


def _escape(character: str) -> str:
    return json.dumps(character)[1:-1]


def unused(texts: Sequence[str]) -> Iterator[str]:
    """Characters that nobody uses and that are not in these texts."""
    for character in map(chr, chain.from_iterable(range(*each) for each in _CANDIDATES)):
        if not any(character in text or _escape(character) in text for text in texts):
            yield character


def _overlaps(tokens: set[str]) -> Callable[[str], bool]:
    """Whether a text contains a token, ends with the beginning of one, or begins with the end of one."""
    forward, backward = sorted(tokens), sorted(token[::-1] for token in tokens)
    lengths = sorted({len(token) for token in tokens if len(token) <= _LONGEST})

    def begins_one(sorted_tokens: list[str], text: str) -> bool:
        at = bisect_left(sorted_tokens, text)
        return at < len(sorted_tokens) and sorted_tokens[at].startswith(text)

    def overlaps(text: str) -> bool:
        places = range(len(text))
        return any(
            begins_one(forward, text[at:])
            or begins_one(backward, text[: at + 1][::-1])
            or any(text[at : at + length] in tokens for length in lengths)
            for at in places
        )

    return overlaps


def texts_of(value: Any) -> Iterator[str]:
    """All texts, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from texts_of(key)
            yield from texts_of(each)
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        for each in value:
            yield from texts_of(each)
    elif value is not None and not isinstance(value, bool | int | float):
        raise KvarnError(
            f"the messages hold an object of type {type(value).__name__}: "
            "give dictionaries, lists, texts, numbers and None"
        )


def _mapped(value: Any, quote: Callable[[str], str]) -> Any:
    """A copy with `quote` applied to every text."""
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, Mapping):
        return {_mapped(key, quote): _mapped(each, quote) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [_mapped(each, quote) for each in value]
    return value
