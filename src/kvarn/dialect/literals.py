"""Reads values that are not JSON, and writes them as JSON while they come: Python's literals, and Gemma's arguments."""

import re

from kvarn.dialect.json_text import DEEPEST, ENDS, Out, is_word, json_string, quoted, read_word
from kvarn.dialect.source import Broken, Source, Steps

_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_PYTHON_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_BARE = re.compile(r"[^,\[\]{}]+")
KEY = re.compile(r"[^\s:,\[\]{}()=\"']+")
MOST_NAME = 256
MOST_BARE = 1 << 16


def read_name(source: Source, pattern: re.Pattern[str]) -> Steps[str]:
    name = ""
    while (yield from source.more()) and (run := source.run(pattern)):
        name += run
        if len(name) > MOST_NAME:
            raise Broken(f"a name has more than {MOST_NAME} characters")
    return name


# -- Python ----------------------------------------------------------------------------------------------------------


def python_arguments(source: Source, out: Out) -> Steps[None]:
    """From after the ( of a call to its )."""
    out("{")
    seen: set[str] = set()
    while True:
        yield from source.spaces()
        if (yield from source.take(")")):
            out("}")
            return
        key = yield from read_name(source, KEY)
        yield from source.spaces()
        if not key or not (yield from source.take("=")):
            raise Broken("an argument without a name" if (yield from source.more()) else ENDS)
        _once(seen, key)
        out(f'{", " if len(seen) > 1 else ""}"{quoted(key)}": ')
        yield from source.spaces()
        yield from python_value(source, out)
        yield from source.spaces()
        if (yield from source.begins((")",))) != ")":
            yield from source.expect(",")


def python_value(source: Source, out: Out, depth: int = 0) -> Steps[None]:
    if depth >= DEEPEST:
        raise Broken(f"the arguments have more than {DEEPEST} levels")
    c = yield from source.peek()
    if not c:
        raise Broken(ENDS)
    if c in "'\"":
        yield from _python_string(source, out)
    elif c in "[({":
        source.at += 1
        yield from _python_container(source, out, depth, {"[": "]", "(": ")", "{": "}"}[c])
    else:
        word = yield from read_word(source)
        word = _WORDS.get(word, word)
        if not is_word(word):
            raise Broken(f"{(word or c)[:40]!r} is not a literal of Python")
        out(word)


def _python_container(source: Source, out: Out, depth: int, close: str) -> Steps[None]:
    out("{" if close == "}" else "[")
    first = True
    while True:
        yield from source.spaces()
        if (yield from source.take(close)):
            out("}" if close == "}" else "]")
            return
        out("" if first else ", ")
        first = False
        if close == "}":
            if (yield from source.begins(("'", '"'))) == "":
                raise Broken("a key of a dictionary is not a text" if (yield from source.more()) else ENDS)
            yield from _python_string(source, out)
            yield from source.spaces()
            yield from source.expect(":")
            out(": ")
            yield from source.spaces()
        yield from python_value(source, out, depth + 1)
        yield from source.spaces()
        if (yield from source.begins((close,))) != close:
            yield from source.expect(",")


def _python_string(source: Source, out: Out) -> Steps[None]:
    quote = source.text[source.at]
    source.at += 1
    out('"')
    while (yield from source.more()):
        if plain := source.run(_PYTHON_PLAIN[quote]):
            out(quoted(plain))
            continue
        c = source.text[source.at]
        source.at += 1
        if c == quote:
            out('"')
            return
        yield from _python_escape(source, out)
    raise Broken(ENDS)


def _python_escape(source: Source, out: Out) -> Steps[None]:
    c = yield from source.peek()
    if not c:
        raise Broken(ENDS)
    source.at += 1
    if (length := _HEX_ESCAPES.get(c)) is None:
        out(quoted(_ESCAPES.get(c, c if c in "\\'\"" else f"\\{c}")))
        return
    digits = ""
    while len(digits) < length and (yield from source.more()):
        digits += source.text[source.at]
        source.at += 1
    try:
        code = int(digits, 16)
        out(f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else quoted(chr(code)))  # a half of a pair is no character
    except (ValueError, OverflowError):
        raise Broken(f"\\{c}{digits} is not an escape of Python") from None


# -- Gemma -----------------------------------------------------------------------------------------------------------


def gemma_object(source: Source, out: Out, quote: str, depth: int = 0) -> Steps[None]:
    """From the { to the }."""
    yield from source.expect("{")
    out("{")
    seen: set[str] = set()
    while True:
        yield from source.spaces()
        if (yield from source.take("}")):
            out("}")
            return
        key = yield from _gemma_key(source, quote)
        yield from source.spaces()
        yield from source.expect(":")
        _once(seen, key)
        out(f'{", " if len(seen) > 1 else ""}"{quoted(key)}": ')
        yield from _gemma_value(source, out, quote, depth + 1)
        yield from source.spaces()
        if (yield from source.begins(("}",))) != "}":
            yield from source.expect(",")


def _gemma_key(source: Source, quote: str) -> Steps[str]:
    parts: list[str] = []
    if (yield from source.take(quote)):
        yield from _gemma_text(source, parts.append, quote)
        return "".join(parts)
    if (yield from source.take('"')):
        key = yield from read_name(source, KEY)
        yield from source.expect('"')
    else:
        key = yield from read_name(source, KEY)
    if not key:
        raise Broken("an argument without a name" if (yield from source.more()) else ENDS)
    return key


def _gemma_value(source: Source, out: Out, quote: str, depth: int) -> Steps[None]:
    if depth >= DEEPEST:
        raise Broken(f"the arguments have more than {DEEPEST} levels")
    yield from source.spaces()
    if (yield from source.take(quote)):
        out('"')
        yield from _gemma_text(source, lambda text: out(quoted(text)), quote)
        out('"')
        return
    c = yield from source.peek()
    if c == "{":
        yield from gemma_object(source, out, quote, depth)
    elif c == "[":
        yield from _gemma_list(source, out, quote, depth)
    elif c == '"':
        yield from json_string(source, out)
    else:
        word = yield from _bare(source)
        out(word if is_word(word) else f'"{quoted(word)}"')


def _gemma_list(source: Source, out: Out, quote: str, depth: int) -> Steps[None]:
    source.at += 1
    out("[")
    first = True
    while True:
        yield from source.spaces()
        if (yield from source.take("]")):
            out("]")
            return
        out("" if first else ", ")
        first = False
        yield from _gemma_value(source, out, quote, depth + 1)
        yield from source.spaces()
        if (yield from source.begins(("]",))) != "]":
            yield from source.expect(",")


def _gemma_text(source: Source, out: Out, quote: str) -> Steps[None]:
    """From after the opening quote to the closing one."""
    plain = re.compile(rf"[^{re.escape(quote[0])}]+")
    while (yield from source.more()):
        if run := source.run(plain):
            out(run)
        elif (yield from source.take(quote)):
            return
        else:
            out(source.text[source.at])
            source.at += 1
    raise Broken(ENDS)


def _bare(source: Source) -> Steps[str]:
    parts: list[str] = []
    size = 0
    while (yield from source.more()) and (run := source.run(_BARE)):
        parts.append(run)
        size += len(run)
        if size > MOST_BARE:
            raise Broken(f"a value without quotes has more than {MOST_BARE} characters")
    if not (yield from source.more()):
        raise Broken(ENDS)
    word = "".join(parts).strip()
    if not word:
        raise Broken("an argument without a value")
    return word


def _once(seen: set[str], key: str) -> None:
    if key in seen:
        raise Broken(f"the argument {key[:40]!r} comes twice")
    seen.add(key)
