"""The reader of an answer in all forms but harmony: reasoning, then text with sections of calls in it."""

import re
from collections.abc import Callable, Sequence

from kvarn.dialect.calls import Bodies, Call
from kvarn.dialect.deltas import Content, Delta, Malformed, Reasoning
from kvarn.dialect.dialect import Dialect, NewId, Tool
from kvarn.dialect.source import Broken, Source, Steps, Unmarked, longest_first
from kvarn.dialect.texts import Text

LEAST_MARKER = 4  # characters, with which the end of an answer is taken for the beginning of a marker


class Answer:
    def __init__(
        self, dialect: Dialect, tools: Sequence[Tool], source: Source, say: Callable[[Delta], None], new_id: NewId
    ) -> None:
        self._source = source
        self._say = say
        self._new_id = new_id
        self._tools = {tool.name: tool for tool in tools}
        self._call = Call(0, self._tools, say, new_id)
        self._bodies = Bodies(dialect, source, self._new)
        self._section = tuple(marker.strip() for marker in dialect.section)
        self._list = dialect.form == "pythonic" and self._section[0].endswith("[")
        if self._list:  # read apart from the marker: there may be white space between them
            self._section = self._section[0][:-1].rstrip(), self._section[1][1:].lstrip()
        self._marks = tuple(marker.strip() for marker in dialect.call)
        self._separator = dialect.separator.strip()
        self._reasoning = tuple(marker.strip() for marker in dialect.reasoning or ())
        self._begins = longest_first(self._section[0], self._marks[0]) if tools else ()
        self._bare = dialect.bare
        openers = "[" if self._list else "[{" if dialect.bare else "{`" if dialect.form == "json" else ""
        self._openers = openers if tools else ""  # what calls without a marker begin with
        again = self._reasoning[:1] if self._reasoning and self._reasoning[0] in dict(dialect.control) else ()
        self._triggers = longest_first(*self._begins, *again)
        firsts = re.escape("".join({marker[0] for marker in self._triggers}) + self._openers)
        self._plain = re.compile(rf"[^{firsts}]+" if firsts else r"(?s:.+)")

    def _new(self) -> Call:
        self._call.end()
        self._call = Call(self._call.next_index, self._tools, self._say, self._new_id)
        return self._call

    def read(self, opened: bool) -> Steps[None]:
        source = self._source
        before = yield from source.spaces()
        thought = bool(self._reasoning) and ((yield from source.take(self._reasoning[0])) or opened)
        text = Text(Content, self._say, after=thought)
        if thought:
            yield from self._think()
        else:
            text.add(before)
        openers = self._openers
        while (yield from source.more()):
            if run := source.run(self._plain):
                text.add(run)
                openers = "" if run.strip() else openers
            elif source.text[source.at] in openers:
                text = yield from self._unmarked(text)
                openers = ""
            elif marker := (yield from source.begins(self._triggers)):
                text = Text(Content, self._say, after=True)
                if marker in self._begins:
                    yield from self._calls(marker)
                else:
                    source.at += len(marker)
                    yield from self._think()
            elif source.ended and self._cut(rest := source.text[source.at :]):
                source.at = len(source.text)
                text.end()
                self._say(Malformed(rest, "the text ends inside the marker of a call"))
                return
            else:
                text.add(source.text[source.at])
                source.at += 1
                openers = ""
        text.end()

    def _cut(self, rest: str) -> bool:
        """Whether it is the beginning of a call's marker, and not of something else."""
        return len(rest) >= LEAST_MARKER and any(marker.startswith(rest) for marker in self._begins)

    def _think(self) -> Steps[None]:
        """From after the begin marker to the end marker."""
        source, end = self._source, self._reasoning[1]
        text = Text(Reasoning, self._say, after=True)
        plain = re.compile(rf"[^{re.escape(end[0])}]+")
        while (yield from source.more()):
            if run := source.run(plain):
                text.add(run)
            elif (yield from source.take(end)):
                return
            else:
                text.add(source.text[source.at])
                source.at += 1
        text.end()

    def _calls(self, marker: str) -> Steps[None]:
        """A section with its calls, or a call without a section."""
        source = self._source
        source.keep()
        source.at += len(marker)
        section = marker == self._section[0]
        first = True
        while True:
            try:
                if section and not (yield from self._next(first)):
                    return
                yield from self._bodies.read()
                yield from self._close(section)
            except Broken as error:
                if not (yield from self._recover(str(error), section)):
                    return
            else:
                if not section and not (self._bare and (yield from self._separated())):
                    return
            first = False
            source.keep()

    def _next(self, first: bool) -> Steps[bool]:
        """To the next call of a section. False: there is none."""
        source, (begin, _), end = self._source, self._marks, self._section[1]
        yield from source.spaces()
        if not first and self._separator and (yield from source.take(self._separator)):
            yield from source.spaces()
        if self._list and (yield from source.take("[" if first else "]")):
            yield from source.spaces()
        if not (yield from source.more()) or (end and (yield from source.take_end(end))):
            return False
        again = yield from source.begins(longest_first(self._section[0], begin))
        if (again and again != begin) or (not again and not end and not first):
            return False
        yield from source.expect(begin)
        return True

    def _separated(self) -> Steps[bool]:
        """Whether another call follows one without an end marker."""
        yield from self._source.spaces()
        if not (yield from self._source.take(self._separator)):
            return False
        yield from self._source.spaces()
        return bool((yield from self._source.begins(("{",))))

    def _close(self, section: bool) -> Steps[None]:
        source = self._source
        yield from source.spaces()
        if (yield from source.more()):
            others = longest_first(self._section[1], self._section[0], self._marks[0])
            if not (yield from source.take_end(self._marks[1])) and not (yield from source.begins(others)):
                raise Broken(f"{self._marks[1]!r} does not follow the call")
        self._call.end()
        if not section and self._section[1]:  # its begin was forgotten
            yield from source.spaces()
            yield from source.take_end(self._section[1])

    def _recover(self, error: str, section: bool) -> Steps[bool]:
        """To the end of the call that cannot be read. True: the section goes on."""
        source = self._source
        end = self._section[1] if section and len(self._section[1]) > 1 else ""
        ends = longest_first(self._marks[1], end)
        stops = longest_first(*ends, *self._begins)
        firsts = re.escape("".join({marker[0] for marker in stops}))
        plain = re.compile(rf"[^{firsts}]+" if firsts else r"(?s:.+)")
        stop = ""
        while (yield from source.more()):
            if source.run(plain):
                continue
            if stop := (yield from source.begins(stops)):
                break
            source.at += 1
        if stop in ends:
            source.at += len(stop)
        self._call.broke(source.kept, error)
        return section and stop != "" and stop in self._marks

    def _unmarked(self, text: Text) -> Steps[Text]:
        """Calls without a marker, at the beginning of the answer. Returns the text that follows: `text` if there are
        none.

        If the dialect has markers, the model forgot them, or wrote code blocks instead. Then only what names a tool
        counts.
        """
        source = self._source
        self._bodies.unmarked = True
        try:
            while (yield from source.begins(("```", *self._openers))):
                source.keep()
                self._call.named = False
                yield from self._unmarked_block()
                text = Text(Content, self._say, after=True)
                if self._list:
                    break
                source.keep()
                yield from source.spaces()
        except Broken as error:
            strict = isinstance(error, Unmarked)
            if not strict and not self._call.begun and not (self._bare and self._call.named):
                text.add(source.kept)
                return text
            yield from self._recover(str(error), False)
            text = Text(Content, self._say, after=True)
        finally:
            self._bodies.unmarked = False
        return text

    def _unmarked_block(self) -> Steps[None]:
        """Calls with separators, perhaps in a code block."""
        source = self._source
        fence = not self._bare and not self._list and (yield from source.take("```"))
        if fence and (yield from source.take("json")):
            yield from source.spaces()
        yield from source.expect("[" if self._list else "")
        while True:
            yield from self._bodies.read()
            yield from source.spaces()
            separator = yield from source.begins((";", ","))
            if separator:
                source.keep()
                source.at += 1
                yield from source.spaces()
            again = (yield from source.more()) if self._list else bool((yield from source.begins(("{",))))
            if not again or (self._list and not separator):
                break
            if not separator:
                source.keep()
        if self._list and (yield from source.more()):
            yield from source.expect("]")
        self._call.end()
        if fence:
            yield from source.spaces()
            yield from source.take("```")
