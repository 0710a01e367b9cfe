"""Finds a model's format from what its template writes for calls with known names, keys and values.

The template renders a turn with one call, and one with two. What both have around the known texts are the markers. A
format counts only if the parser reads back what the template wrote.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvarn.dialect.deltas import CallArguments, CallBegin, Content, Malformed, Reasoning, joined
from kvarn.dialect.dialect import Dialect, Tool
from kvarn.dialect.families import REASONING
from kvarn.dialect.parser import Parser
from kvarn.errors import KvarnError

Render = Callable[..., str]
NAMES = ("kvarn_tool_a", "kvarn_tool_b")
ARGUMENTS = ({"kvarn_key_a": "kvarn_value_a", "kvarn_key_b": "kvarn_value_b"}, {"kvarn_key_c": "kvarn_value_c"})
IDS = ("kvarncal1", "kvarncal2")  # Mistral's templates want nine characters
_TEXT = {"type": "string"}
TOOLS = [
    Tool(name, "x", {"type": "object", "properties": dict.fromkeys(args, _TEXT)})
    for name, args in zip(NAMES, ARGUMENTS, strict=True)
]
_SAID, _THOUGHT, _ASKED = "kvarn_said", "kvarn_thought", "kvarn_asked"
MOST_FAILURES = 3
MOST_TEXT = 30_000  # characters of a conversation; published templates write a tenth of it
_THINKING = re.compile("think|thought|reason", re.IGNORECASE)
_MARKER = re.compile(r"<[^<>\s]{2,60}>|\[/?[A-Z_]{2,30}\]")


class Rendered:
    """What the template writes. A template that fails writes nothing. One that fails again and again is not asked any
    more: each time may take as long as the caller's limit."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._failures = 0

    def turn(self, **message: Any) -> str:
        if self._failures >= MOST_FAILURES:
            return ""
        try:
            messages = [{"role": "user", "content": _ASKED}, {"role": "assistant", **message}]
            return str(self._render(messages, add_generation_prompt=False, tools=as_fields(TOOLS)))[:MOST_TEXT]
        except KvarnError:
            self._failures += 1
            return ""

    def calls(self, n: int, as_text: bool) -> str:
        """What the template writes for n calls: the turn without what every turn has."""
        calls = [
            {
                "id": id,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(args) if as_text else args},
            }
            for id, name, args in list(zip(IDS, NAMES, ARGUMENTS, strict=True))[:n]
        ]
        turn = self.turn(content="", tool_calls=calls)
        plain = self.turn(content=_SAID) if turn else ""
        said = plain.find(_SAID)
        if said < 0:
            return ""
        head, tail = plain[:said], plain[said + len(_SAID) :]
        if not turn.startswith(head):
            head = _whole_tags(_shared(turn, head))
        if not turn.endswith(tail):
            tail = _shared(turn[::-1], tail[::-1])[::-1]
        return _whole_tags(turn[len(head) : len(turn) - len(tail)])


def _shared(a: str, b: str) -> str:
    """The longest text that both begin with."""
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:n]


def _whole_tags(text: str) -> str:
    """Without the begin of a tag at the end."""
    at = text.rfind("<")
    return text[:at] if at > text.rfind(">") else text


def as_fields(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools as templates expect them."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in tools
    ]


def reads(dialect: Dialect, text: str, n: int) -> bool:
    """Whether the parser reads the n calls from what the template wrote."""
    parser = Parser(dialect, TOOLS, new_id=lambda: "")
    found = joined([*parser.push(text), *parser.finish()])
    names = [delta.name for delta in found if isinstance(delta, CallBegin)]
    texts = [delta.text for delta in found if isinstance(delta, CallArguments)]
    said = "".join(delta.text for delta in found if isinstance(delta, Content))  # the end of the turn, perhaps
    if any(isinstance(delta, Malformed | Reasoning) for delta in found) or _MARKER.sub("", said).strip():
        return False
    return names == list(NAMES[:n]) and [json.loads(text) for text in texts] == list(ARGUMENTS[:n])


def derived(rendered: Rendered) -> Dialect | None:
    for as_text in (False, True):
        one = rendered.calls(1, as_text)
        two = rendered.calls(2, as_text) if NAMES[0] in one else ""
        for find in (_json, _named, _tagged):
            dialect = find(one, two)
            if dialect is None or any("kvarn" in marker for marker in dialect.markers):
                continue
            if reads(dialect, one, 1):
                parallel = reads(dialect, two, 2)
                return replace(dialect, origin="derived", parallel=parallel, arguments_as_text=as_text)
    return None


def _json(one: str, two: str) -> Dialect | None:
    """An object with name and arguments."""
    found = _object_with(one, NAMES[0])
    if found is None:
        return None
    begin, end, value = found
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    names = [key for key, each in inner.items() if each == NAMES[0]]
    keys = [key for key, each in inner.items() if each in (ARGUMENTS[0], json.dumps(ARGUMENTS[0]))]
    ids = [key for key, each in value.items() if each == IDS[0]]
    if not names or not keys or inner is not value:
        return None
    before, after = one[:begin], one[end:]
    dialect = Dialect("derived", name_key=names[0], arguments_key=keys[0], id_key=ids[0] if ids else "")
    if before.rstrip().endswith("[") and after.lstrip().startswith("]"):
        ends = before.rstrip()[:-1], after.lstrip()[1:]
        return replace(dialect, call=ends, separator=", ", array=True, bare=not ends[0].strip())
    second = _object_with(two[end:], NAMES[1])
    between = two[end : end + second[0]] if second else ""
    return _parted(replace(dialect, bare=not before.strip()), before, after, between)


def _object_with(text: str, name: str) -> tuple[int, int, Mapping[str, Any]] | None:
    """Begin, end and value of the outermost JSON object in which the name is a text."""
    limit = text.find(name)
    decoder = json.JSONDecoder()
    for at in (match.start() for match in re.finditer(r"\{", text[: max(limit, 0)])):
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and end > limit:
            return at, end, value
    return None


def _named(one: str, two: str) -> Dialect | None:
    """The name, then an object with the arguments."""
    name = one.find(NAMES[0])
    begin = one.find("{", name)
    if name < 0 or begin < 0:
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(one, begin)
    except (ValueError, RecursionError):
        return None
    if value != ARGUMENTS[0]:
        return None
    between = two[end : two.find(NAMES[1])] if NAMES[1] in two else ""
    dialect = Dialect("derived", form="named", name_end=one[name + len(NAMES[0]) : begin])
    return _parted(dialect, one[:name], one[end:], between)


def _tagged(one: str, two: str) -> Dialect | None:
    """The name, then keys and values between tags."""
    (key_a, value_a), (key_b, value_b) = ARGUMENTS[0].items()
    parts = _between(one, NAMES[0], key_a, value_a, key_b, value_b)
    if parts is None:
        return None
    before, name_key, key_value, value_key, again, after = parts
    value_end = _whole_tags(_shared(value_key, after))
    key_begin = value_key[len(value_end) :]
    if key_value != again or not value_end.strip() or not key_begin.strip() or not name_key.endswith(key_begin):
        return None
    if '="' in key_value:
        return None  # the value's type is an attribute
    at = key_value.rfind("<") if key_value.count("<") > 1 else len(key_value)
    between = ""
    if NAMES[1] in two:
        last = two.find(value_b) + len(value_b)
        between = two[last : two.find(NAMES[1])].removeprefix(value_end)
    dialect = Dialect(
        "derived",
        form="tagged",
        name_end=name_key.removesuffix(key_begin),
        key=(key_begin, key_value[:at]),
        value=(key_value[at:], value_end),
    )
    return _nested(_parted(dialect, before, after.removeprefix(value_end), between))


def _between(text: str, *known: str) -> list[str] | None:
    """The parts of a text between known texts."""
    parts = []
    for each in known:
        part, found, text = text.partition(each)
        if not found:
            return None
        parts.append(part)
    return [*parts, text]


def _parted(dialect: Dialect, before: str, after: str, between: str) -> Dialect | None:
    """The markers of the section and of a call, from what is before the first, after the last and between two calls."""
    if not between:
        call, section, separator = (before, after), ("", ""), ""
    else:
        end = _whole_tags(_shared(after, between))
        begin = _shared(before[::-1], between[len(end) :][::-1])[::-1]
        call = begin, end
        section = before.removesuffix(begin), after.removeprefix(end)
        separator = between[len(end) : len(between) - len(begin)]
    if not (section[0] + call[0]).strip() and not dialect.bare:
        return None
    if section[0].strip() and not section[1].strip() and not call[0].strip():
        call, section = (section[0], call[1]), ("", "")
    return replace(dialect, section=section, call=call, separator=separator)


def _nested(dialect: Dialect | None) -> Dialect | None:
    """<outer> <inner NAME> ... </inner> </outer> for each call: outer is a section, which models sometimes forget."""
    if dialect is None or dialect.section[0].strip():
        return dialect
    begin, end = (
        re.fullmatch(r"(?s)(<[^<>\s]+>\s*)(<.*)", dialect.call[0]),
        re.fullmatch(r"(?s)(.*>)(\s*</[^<>\s]+>\s*)", dialect.call[1]),
    )
    if begin is None or end is None:
        return dialect
    section, call = (begin.group(1), end.group(2)), (begin.group(2), end.group(1))
    return replace(dialect, section=section, call=call, one_per_section=True)


def reasoning(rendered: Rendered, source: str) -> tuple[str, str] | None:
    """The markers around reasoning, from what the template writes, else from its source."""
    for field in ("reasoning_content", "reasoning", "thinking"):
        turn = rendered.turn(content=_SAID, **{field: _THOUGHT})
        begin, end = turn.find(_THOUGHT), turn.find(_SAID)
        if 0 <= begin < end:
            before, between = turn[:begin], turn[begin + len(_THOUGHT) : end]
            for pair in REASONING:
                if before.rstrip().endswith(pair[0]) and pair[1] in between:
                    return _with_space(before, between, pair)
            first, last = list(_MARKER.finditer(before)), _MARKER.search(between)
            if first and last and _THINKING.search(first[-1].group()) and not before[first[-1].end() :].strip():
                return _with_space(before, between, (first[-1].group(), last.group()))
    for pair in REASONING:
        if pair[0] in source and pair[1] in source:
            return pair
    return ("<think>", "</think>") if "</think>" in source else None


def _with_space(before: str, between: str, pair: tuple[str, str]) -> tuple[str, str]:
    at = between.index(pair[1])
    lead = between[:at] if not between[:at].strip() else ""
    tail = between[at + len(pair[1]) :]
    return before[before.rindex(pair[0]) :], lead + pair[1] + (tail if not tail.strip() else "")
