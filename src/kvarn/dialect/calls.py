"""Reads the calls of a section. One reader for each form of a call's body (dialect.py)."""

import json
import re
from collections.abc import Callable, Mapping

from kvarn.dialect.deltas import CallArguments, CallBegin, CallEnd, Delta, Malformed
from kvarn.dialect.dialect import Dialect, NewId, Tool
from kvarn.dialect.json_text import ENDS, json_value, string_value
from kvarn.dialect.literals import gemma_object, python_arguments, read_name
from kvarn.dialect.source import Broken, Source, Steps, Unmarked
from kvarn.dialect.tagged import Tagged

_NAME = re.compile(r"[^\s<>\[\]{}()\"'`,=;]+")
_KEYS = ("arguments", "parameters")  # models mix them up
_FIRST = ("name", "id", "type", "function")  # other keys that a call may begin with
MOST_KEYS = 64  # of the object around a call
ENVELOPE = ("function",)  # {"type": "function", "function": {"name": ...}}


class Call:
    """A call that is being read. Nothing is said of it before its tool and the begin of its arguments are known."""

    def __init__(self, index: int, tools: Mapping[str, Tool], say: Callable[[Delta], None], new_id: NewId) -> None:
        self.index = index
        self.tool: Tool | None = None
        self.id = ""
        self.begun = False  # its CallBegin was sent
        self.named = False  # the model wrote a name
        self.done = False  # all of it was read
        self._ended = False
        self._tools = tools
        self._say = say
        self._new_id = new_id
        self._waiting: list[str] = []

    def name(self, name: str) -> Tool:
        self.named = True
        if self.tool is not None:
            raise Broken("the call has two names")
        short = re.sub(r":[0-9]+$", "", name.removeprefix("functions."))
        tool = self._tools.get(name) or self._tools.get(short)
        if tool is None:
            raise Broken(f"there is no tool {short[:80]!r}" if name else "the call has no name")
        self.tool = tool
        return tool

    def argue(self, text: str) -> None:
        """A } waits for what follows: arguments are never complete before the call is."""
        self._waiting.append(text)
        if self.tool is None:
            return
        self.begin()
        text = "".join(self._waiting)
        self._waiting = ["}"] if text.endswith("}") else []
        if text := text.removesuffix("}"):
            self._say(CallArguments(self.index, text))

    def begin(self) -> None:
        assert self.tool is not None
        if not self.begun:
            self.begun = True
            self._say(CallBegin(self.index, self.id or self._new_id(), self.tool.name))

    @property
    def next_index(self) -> int:
        return self.index + self.begun

    def end(self) -> None:
        """After what must follow the call has been read."""
        if self.done and not self._ended:
            self._ended = True
            self._say(CallArguments(self.index, "".join(self._waiting)))
            self._say(CallEnd(self.index))

    def broke(self, text: str, error: str) -> None:
        open = self.begun and not self._ended
        self._say(Malformed(text, error, self.index if open else None))
        if open:
            self._ended = True
            self._say(CallEnd(self.index, complete=False))


class Bodies:
    """The readers of all forms but harmony. `new` makes the next call."""

    def __init__(self, dialect: Dialect, source: Source, new: Callable[[], Call]) -> None:
        self._dialect = dialect
        self._source = source
        self._new = new
        self._name_end = dialect.name_end.strip()
        self._arguments_keys = {dialect.arguments_key, *_KEYS}
        self._tagged = Tagged(dialect, source)
        self.unmarked = False  # no marker came before: an object is a call only if its first key is one of a call's
        readers = {"json": self._json, "named": self._named, "tagged": self._in_tags}
        self.read: Callable[[], Steps[None]] = (readers | {"pythonic": self._pythonic, "gemma": self._gemma})[
            dialect.form
        ]

    def _json(self) -> Steps[None]:
        source = self._source
        yield from source.spaces()
        if not (yield from source.take("[")):
            yield from self._object()
            return
        yield from source.spaces()
        while not (yield from source.take("]")):
            yield from self._object()
            yield from source.spaces()
            if (yield from source.begins((",",))):
                source.keep()
            if (yield from source.begins(("]",))) != "]" and (yield from source.more()):
                yield from source.expect(",")
                yield from source.spaces()
            if not (yield from source.more()):
                return  # a complete call

    def _object(self) -> Steps[None]:
        call = self._new()
        argued = yield from self._envelope(call)
        if call.tool is None:
            raise Broken("the call has no name")
        call.argue("" if argued else "{}")
        call.done = True

    def _envelope(self, call: Call, inner: bool = False) -> Steps[bool]:
        """{"name": ..., "arguments": {...}}. True: it had arguments."""
        source, argued = self._source, False
        yield from source.expect("{")
        yield from source.spaces()
        for number in range(MOST_KEYS):
            if (yield from source.take("}")):
                return argued
            key = yield from string_value(source)
            if self.unmarked and not number and key not in {*self._arguments_keys, *_FIRST, self._dialect.name_key}:
                raise Broken("the object is not a call")
            yield from source.spaces()
            yield from source.expect(":")
            yield from source.spaces()
            if key == self._dialect.name_key or (key == "name" and call.tool is None):
                tool = call.name((yield from string_value(source)))
                if tool.strict and self.unmarked and not self._dialect.bare:
                    begin = (self._dialect.section[0] + self._dialect.call[0]).strip()
                    raise Unmarked(f"the model called the strict function {tool.name!r} without {begin!r}")
            elif key in self._arguments_keys:
                if argued:
                    raise Broken("the call has arguments twice")
                argued = True
                yield from self._arguments(call)
            elif key in ENVELOPE and not inner and (yield from source.begins(("{",))):
                argued = (yield from self._envelope(call, True)) or argued
            else:
                value: list[str] = []
                yield from json_value(source, value.append)
                if key == self._dialect.id_key and self._dialect.accepts_id(id := "".join(value).strip('"')):
                    call.id = id
            yield from source.spaces()
            if (yield from source.begins(("}",))) != "}":
                yield from source.expect(",")
                yield from source.spaces()
        raise Broken(f"the object around the call has more than {MOST_KEYS} keys")

    def _arguments(self, call: Call) -> Steps[None]:
        """An object, as it comes. Some models write it as a text, or null for none."""
        source = self._source
        if (yield from source.begins(("{",))):
            yield from json_value(source, call.argue)
            return
        parts: list[str] = []
        yield from json_value(source, parts.append)
        value = json.loads("".join(parts))
        if isinstance(value, str):
            try:
                found = json.loads(value or "{}")
            except (ValueError, RecursionError):
                found = None
            if isinstance(found, dict):
                call.argue(json.dumps(found))
                return
        if value is not None:
            raise Broken("the arguments are not an object")
        call.argue("{}")

    def _named(self) -> Steps[None]:
        source, call, marker = self._source, self._new(), self._dialect.id_key
        yield from self._called(call)
        if marker and (yield from source.take(marker)):
            id = yield from read_name(source, _NAME)
            call.id = id if self._dialect.accepts_id(id) else ""
        yield from source.spaces()
        yield from source.expect(self._name_end)
        yield from source.spaces()
        if (yield from source.begins(("{",))) != "{":
            raise Broken("the arguments are not an object" if (yield from source.more()) else ENDS)
        yield from json_value(source, call.argue)
        call.done = True

    def _in_tags(self) -> Steps[None]:
        source, call = self._source, self._new()
        tool = yield from self._called(call)
        yield from source.spaces()
        yield from source.expect(self._name_end)
        yield from self._tagged.arguments(tool, call.argue)
        call.done = True

    def _pythonic(self) -> Steps[None]:
        if (yield from self._source.begins(("{",))):  # some models write JSON all the same
            yield from self._object()
            return
        call = self._new()
        yield from self._called(call, "(")
        yield from python_arguments(self._source, call.argue)
        call.done = True

    def _gemma(self) -> Steps[None]:
        call = self._new()
        yield from self._called(call)
        yield from gemma_object(self._source, call.argue, self._dialect.quote)
        call.done = True

    def _called(self, call: Call, then: str = "") -> Steps[Tool]:
        """The name. `then` must follow it, before it counts as a name."""
        yield from self._source.spaces()
        name = yield from read_name(self._source, _NAME)
        if not (name or (yield from self._source.more())):
            raise Broken(ENDS)
        yield from self._source.spaces()
        yield from self._source.expect(then)
        if self._dialect.numbered and self._dialect.accepts_id(name):
            call.id = name
        return call.name(name)
