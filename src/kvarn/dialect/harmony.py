"""The reader of gpt-oss's format: messages, each with a channel and sometimes a recipient.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>{...}<|call|>

The channel analysis is reasoning. Messages to a tool are calls. All others are text.
"""

import re
from collections.abc import Callable, Sequence

from kvarn.dialect.calls import Call
from kvarn.dialect.deltas import Content, Delta, Malformed, Reasoning
from kvarn.dialect.dialect import Dialect, NewId, Tool
from kvarn.dialect.json_text import ENDS, json_value
from kvarn.dialect.source import Broken, Source, Steps
from kvarn.dialect.texts import Text

_MESSAGE = "<|message|>"
_HEADS = ("<|channel|>", "<|start|>", "to=")
_ENDS = ("<|return|>", "<|call|>", "<|end|>")
_STOPS = ("<|channel|>", "<|return|>", "<|start|>", "<|call|>", "<|end|>")
_PLAIN = re.compile(r"[^<]+")
MOST_HEAD = 1000  # characters before a message


class Harmony:
    def __init__(
        self, dialect: Dialect, tools: Sequence[Tool], source: Source, say: Callable[[Delta], None], new_id: NewId
    ) -> None:
        self._source = source
        self._say = say
        self._new_id = new_id
        self._tools = {tool.name: tool for tool in tools}
        self._call = Call(0, self._tools, say, new_id)
        self._after = False

    def answer(self) -> Steps[None]:
        source = self._source
        while (yield from source.more()):
            source.keep()
            spaces = yield from source.spaces()
            if not (yield from source.begins(_HEADS)):
                yield from self._text(Content, "" if self._after else spaces)
                continue
            head = yield from self._head()
            if head is None:
                self._say(Malformed(source.kept, f"a message without {_MESSAGE}"))
                continue
            channel = re.search(r"<\|channel\|>\s*(\w+)", head)
            to = re.search(r"\bto=([^\s<]+)", head)
            if to is not None:
                yield from self._read_call(to.group(1))
            elif channel is not None and channel.group(1) == "analysis":
                yield from self._text(Reasoning)
            else:
                yield from self._text(Content)

    def _head(self) -> Steps[str | None]:
        parts = ""
        while not (yield from self._source.take(_MESSAGE)):
            if len(parts) >= MOST_HEAD or not (yield from self._source.more()):
                return None
            parts += self._source.text[self._source.at]
            self._source.at += 1
        return parts

    def _text(self, kind: type[Content] | type[Reasoning], before: str = "") -> Steps[None]:
        source, text = self._source, Text(kind, self._say, self._after)
        self._after = True
        text.add(before)
        while (yield from source.more()):
            if run := source.run(_PLAIN):
                text.add(run)
            elif stop := (yield from source.begins(_STOPS)):
                source.at += len(stop) if stop in _ENDS else 0
                return
            else:
                text.add("<")
                source.at += 1
        text.end()

    def _read_call(self, name: str) -> Steps[None]:
        source = self._source
        self._call = call = Call(self._call.next_index, self._tools, self._say, self._new_id)
        self._after = True
        try:
            call.name(name)
            yield from source.spaces()
            if (yield from source.begins(_ENDS)):
                call.argue("{}")
            elif (yield from source.begins(("{",))):
                yield from json_value(source, call.argue)
            else:
                raise Broken("the arguments are not an object" if (yield from source.more()) else ENDS)
            call.done = True
            yield from source.spaces()
            if (yield from source.more()) and not (yield from source.begins(_STOPS)):
                raise Broken("text follows the arguments")
            call.end()
        except Broken as error:
            yield from self._skip()
            call.broke(source.kept, str(error))
        else:
            yield from self._skip()

    def _skip(self) -> Steps[None]:
        """To the end of the message."""
        source = self._source
        while (yield from source.more()):
            if source.run(_PLAIN):
                continue
            if stop := (yield from source.begins(_STOPS)):
                source.at += len(stop) if stop in _ENDS else 0
                return
            source.at += 1
