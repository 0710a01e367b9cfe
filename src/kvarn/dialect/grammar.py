"""The grammar of an answer with tool calls, in llguidance's variant of Lark, from the same data as the parser.

A schema goes into the grammar as `%json`, and text in a format without JSON becomes rules. What cannot be expressed in
the model's format is refused by name.
"""

import json
from collections.abc import Sequence

from kvarn.dialect.dialect import Dialect, Tool
from kvarn.dialect.lark import Lark
from kvarn.dialect.schemas import Schemas
from kvarn.errors import KvarnError

MOST_CALLS = 16  # of one block, so that a model which repeats calls comes to an end
_MORE = f"{{0,{MOST_CALLS - 1}}}"


def grammar(
    dialect: Dialect,
    tools: Sequence[Tool],
    *,
    required: bool,
    only: str | None = None,
    parallel: bool = True,
    reasoning: bool = True,
) -> str:
    """`required`: the answer is 1 to MOST_CALLS calls. Else it is text, in which calls are constrained. `only`: the
    only tool that may be called. `reasoning`: the answer may begin with reasoning; not so if the prompt has opened it.

    The arguments follow the schema of the tool if they must be called or the tool is strict. Else they are any object.
    """
    chosen = [tool for tool in tools if only is None or tool.name == only]
    if not chosen:
        raise KvarnError(f"tool_choice names {only!r}, which is not in tools" if only else "there are no tools to call")
    lark = Lark(dialect.control)
    writer = _Harmony(dialect, lark) if dialect.form == "harmony" else _Writer(dialect, lark)
    bodies = [writer.body(tool, tool.parameters if required or tool.strict else None) for tool in chosen]
    body = lark.rule("body", " | ".join(bodies))
    several = parallel and dialect.parallel
    if required:
        start = f"{writer.thinking(reasoning)} {writer.block(body, several)}"
    else:
        start = writer.free(body, several, reasoning)
    return lark.document(start)


class _Writer:
    """All forms but harmony."""

    def __init__(self, dialect: Dialect, lark: Lark) -> None:
        self._dialect = dialect
        self._lark = lark

    def body(self, tool: Tool, schema: object) -> str:
        """What is between call[0] and call[1]."""
        d, text, plain = self._dialect, self._lark.text, self._lark.plain
        values = Schemas(d, self._lark, tool, schema)
        if d.form == "json":
            id = ""
            if d.id_key and d.ids == "nine":
                id = f"{text(f', {json.dumps(d.id_key)}: ' + chr(34))} /[a-zA-Z0-9]{{9}}/ {text(chr(34))}"
            before = f"{{{json.dumps(d.name_key)}: {json.dumps(tool.name)}, {json.dumps(d.arguments_key)}: "
            parts = [plain(before), values.whole(), id, text("}")]
        elif d.form == "named":
            name = f"{plain(f'functions.{tool.name}:')} /[0-9]+/" if d.numbered else plain(tool.name)
            id = f"({text(d.id_key)} /[a-zA-Z0-9]{{9}}/)?" if d.id_key else ""
            parts = [name, id, text(d.name_end), values.whole()]
        elif d.form == "tagged":
            parts = [plain(tool.name), text(d.name_end), values.tagged()]
        elif d.form == "pythonic":
            parts = [plain(f"{tool.name}("), values.pythonic(), text(")")]
        else:
            parts = [plain(tool.name), values.gemma()]
        return self._lark.rule("tool", " ".join(part for part in parts if part))

    def block(self, body: str, several: bool) -> str:
        """All calls of an answer."""
        return f"{self._lark.text(self._opening)} {self._rest(body, several)}"

    def free(self, body: str, several: bool, reasoning: bool) -> str:
        """Text, in which a call begins as soon as its first marker is written."""
        d, lark = self._dialect, self._lark
        rest = lark.rule(
            "rest", self._rest(body, several and bool(d.section[0].strip() or d.array) and not d.one_per_section)
        )
        think = self.thinking(reasoning)
        if not self._opening.strip() or (d.bare and d.form == "pythonic"):
            other = "[^\\[" if d.form == "pythonic" else "[^{\\["
            return f"{think} (/{other} \\t\\r\\n](.|\\n)*/ | {lark.text(self._opening)} {rest})"
        call = f"{lark.until(*lark.trigger(self._opening))} {rest}"
        tail = "/(.|\\n)*/"
        return f"{think} ({call})* {tail}" if several else f"{think} ({tail} | {call})"

    def thinking(self, reasoning: bool) -> str:
        """Reasoning at the beginning of the answer. White space may follow it, also if the prompt has opened it."""
        if self._dialect.reasoning is None:
            return ""
        begin, end = (marker.strip() for marker in self._dialect.reasoning)
        space = "/[ \\t\\r\\n]{0,4}/"
        return f"({self._lark.text(begin)} {self._lark.until(end, '')})? {space}" if reasoning else space

    @property
    def _opening(self) -> str:
        """The markers before the first call."""
        d = self._dialect
        if d.bare:
            return "[" if d.form == "pythonic" else ""
        return d.section[0] + d.call[0] + ("[" if d.array else "")

    def _rest(self, body: str, several: bool) -> str:
        """From after the opening to the end of the last call."""
        d, text = self._dialect, self._lark.text
        again = text(d.separator) or ""
        if d.array:
            more = f"({text(d.separator or ', ')} {body}){_MORE}" if several else ""
            return f"{body} {more} {text(']' + d.call[1])}"
        if d.one_per_section:
            more = (
                f"({again} {text(d.section[0] + d.call[0])} {body} {text(d.call[1] + d.section[1])}){_MORE}"
                if several
                else ""
            )
            return f"{body} {text(d.call[1] + d.section[1])} {more}"
        begin, end = ("", "]" if d.form == "pythonic" else "") if d.bare else (d.call[0], d.section[1])
        more = f"({again} {text(begin)} {body} {text(d.call[1])}){_MORE}" if several else ""
        return f"{body} {text(d.call[1])} {more} {text(end)}"


class _Harmony(_Writer):
    """One call, which ends the answer. Its last token, <|call|>, is one of the model's end tokens."""

    def body(self, tool: Tool, schema: object) -> str:
        text = self._lark.text
        head = text(f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>")
        return self._lark.rule("tool", f"{head} {Schemas(self._dialect, self._lark, tool, schema).whole()}")

    def block(self, body: str, several: bool) -> str:
        return body

    def free(self, body: str, several: bool, reasoning: bool) -> str:
        last = f"{self._lark.text('<|channel|>')} /final|commentary/ {self._lark.text('<|message|>')} /(.|\\n)*/"
        return f"{self.thinking(reasoning)} ({last} | {body})"

    def thinking(self, reasoning: bool) -> str:
        """Any number of messages before the last one."""
        text = self._lark.text
        begin = f"{text('<|channel|>')} /analysis|commentary/ {text('<|message|>')}"
        end = self._lark.until("<|end|>", "<|start|>assistant")
        return f"({begin} {end})*" if reasoning else f"({text('<|start|>assistant')})?"
