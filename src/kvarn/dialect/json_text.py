"""Reads JSON from a source and passes its text on as it comes, always as the beginning of valid JSON.

Two common mistakes of models are repaired, because their meaning is clear: control characters in a string become
escapes, and \\' becomes '.
"""

import json
import re
from collections.abc import Callable

from kvarn.dialect.source import SPACE, Broken, Source, Steps

Out = Callable[[str], None]
DEEPEST = 100  # levels of lists and objects
MOST_WORD = 400  # characters of a number
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")
ENDS = "the text ends inside a call"


def quoted(text: str) -> str:
    """The text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_word(text: str) -> bool:
    return text in ("true", "false", "null") or bool(_NUMBER.fullmatch(text))


def json_value(source: Source, out: Out, depth: int = 0) -> Steps[None]:
    c = yield from source.peek()
    if c == '"':
        yield from json_string(source, out)
    elif c == "{" or c == "[":
        if depth >= DEEPEST:
            raise Broken(f"the arguments have more than {DEEPEST} levels")
        yield from _container(source, out, depth, "}" if c == "{" else "]")
    elif not c:
        raise Broken(ENDS)
    else:
        out((yield from json_word(source)))


def _container(source: Source, out: Out, depth: int, close: str) -> Steps[None]:
    out(source.text[source.at])
    source.at += 1
    yield from _spaces(source, out)
    if (yield from source.take(close)):
        out(close)
        return
    while True:
        if close == "}":
            yield from json_string(source, out)
            yield from _spaces(source, out)
            yield from source.expect(":")
            out(":")
            yield from _spaces(source, out)
        yield from json_value(source, out, depth + 1)
        yield from _spaces(source, out)
        if (yield from source.take(close)):
            out(close)
            return
        yield from source.expect(",")
        out(",")
        yield from _spaces(source, out)


def _spaces(source: Source, out: Out) -> Steps[None]:
    while (yield from source.more()) and source.text[source.at] in SPACE:
        out(source.text[source.at])
        source.at += 1


def json_string(source: Source, out: Out) -> Steps[None]:
    yield from source.expect('"')
    out('"')
    while (yield from source.more()):
        if plain := source.run(_PLAIN):
            out(plain)
            continue
        c = source.text[source.at]
        if c == "\\":
            yield from _escape(source, out)
            continue
        source.at += 1
        out('"' if c == '"' else quoted(c))
        if c == '"':
            return
    raise Broken(ENDS)


def _escape(source: Source, out: Out) -> Steps[None]:
    source.at += 1
    c = yield from source.peek()
    source.at += 1
    if c == "u":
        digits = ""
        while len(digits) < 4:
            digit = yield from source.peek()
            if digit not in _HEX:
                raise Broken("\\u without four hexadecimal digits" if digit else ENDS)
            digits += digit
            source.at += 1
        out(f"\\u{digits}")
    elif c and c in '"\\/bfnrt':
        out(f"\\{c}")
    elif c == "'":
        out("'")
    else:
        raise Broken(f"\\{c} is not an escape of JSON" if c else ENDS)


def json_word(source: Source) -> Steps[str]:
    """A number, true, false or null."""
    word = yield from read_word(source)
    if not is_word(word):
        what = word or source.text[source.at]
        raise Broken(f"{what[:40]!r} is not JSON")
    return word


def read_word(source: Source) -> Steps[str]:
    word = ""
    while (yield from source.more()) and (run := source.run(_WORD)):
        word += run
        if len(word) > MOST_WORD:
            raise Broken(f"a number has more than {MOST_WORD} characters")
    if not (word or (yield from source.more())):
        raise Broken(ENDS)
    return word


def string_value(source: Source) -> Steps[str]:
    """A whole JSON string."""
    parts: list[str] = []
    yield from json_string(source, parts.append)
    return str(json.loads("".join(parts)))
