"""How a model writes tool calls and reasoning, as data: read by parser.py and grammar.py, found by find.py.

The text of an answer:

    [reasoning] text, with any number of sections in it
    section:  section[0]  call  (separator call)*  section[1]       both ends may be empty
    call:     call[0]  body  call[1]

    form      body
    json      {"name": NAME, "arguments": {...}}, or an array of them
    named     NAME name_end {...}
    tagged    NAME name_end (key[0] KEY key[1] value[0] VALUE value[1])*
    pythonic  NAME(KEY=VALUE, ...), with Python's literals
    gemma     NAME{KEY:VALUE, ...}, with `quote` around texts
    harmony   messages with channels (harmony.py)

The markers are exactly what the model's template writes, white space included. The grammar writes them so. The parser
ignores white space at their ends.
"""

import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_BASE62 = string.ascii_letters + string.digits
_ID_RULES: Mapping[str, tuple[str, int]] = {"call": ("call_", 24), "nine": ("", 9)}  # prefix, random characters


@dataclass(frozen=True)
class Tool:
    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)  # a JSON schema
    strict: bool = False


@dataclass(frozen=True)
class Dialect:
    name: str
    origin: str = (
        "family"  # "family": known by its markers; "derived": from the template; "generic": we instruct the model
    )
    form: str = "json"
    section: tuple[str, str] = ("", "")
    call: tuple[str, str] = ("", "")
    separator: str = ""  # between the calls of a section, or between sections of one call
    one_per_section: bool = False
    array: bool = False  # json: the calls are the elements of one array between call[0] and call[1]
    bare: bool = False  # calls at the beginning of the answer may have no marker before them; the grammar writes none
    name_end: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""  # json: the key of the call's id. named: the marker before it
    key: tuple[str, str] = ("", "")
    value: tuple[str, str] = ("", "")
    quote: str = ""
    numbered: bool = False  # the name is written functions.NAME:NUMBER, and this is the call's id
    reasoning: tuple[str, str] | None = None
    ids: str = "call"  # "call": call_ and 24 characters; "nine": exactly 9 characters
    parallel: bool = True
    arguments_as_text: bool = False  # the template wants the arguments of earlier calls as JSON text, not as objects
    control: tuple[tuple[str, int], ...] = ()  # control tokens in the markers, with their ids

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that are not the caller's and not the model's own."""
        ends = (*self.section, *self.call, *self.key, *self.value, *(self.reasoning or ()))
        harmony = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>")
        named = (self.id_key,) if self.form == "named" else ()
        return tuple(
            m for m in (*ends, self.name_end, self.quote, *named, *(harmony if self.form == "harmony" else ())) if m
        )

    def with_control(self, tokens: Mapping[str, int]) -> "Dialect":
        """`tokens`: the texts and ids of the tokenizer's control tokens."""
        used = {text: id for text, id in tokens.items() if text and any(text in marker for marker in self.markers)}
        return replace(self, control=tuple(sorted(used.items())))

    def new_id(self) -> str:
        prefix, length = _ID_RULES[self.ids]
        return prefix + "".join(secrets.choice(_BASE62) for _ in range(length))

    def accepts_id(self, id: str) -> bool:
        """Whether an id that the model wrote may be the id of the call."""
        return bool(re.fullmatch("[A-Za-z0-9]{9}" if self.ids == "nine" else "[A-Za-z0-9_.:-]{1,64}", id))


GENERIC = Dialect("generic", "generic", call=("<tool_call>\n", "\n</tool_call>"), separator="\n")


def opens_reasoning(dialect: Dialect, prompt: str) -> bool:
    """Whether the prompt ends inside a reasoning section, so that the answer begins in it."""
    if dialect.reasoning is None:
        return False
    begin, end = (marker.strip() for marker in dialect.reasoning)
    return bool(begin) and prompt.rfind(begin) > prompt.rfind(end) and prompt.rstrip().endswith(begin)


NewId = Callable[[], str]
