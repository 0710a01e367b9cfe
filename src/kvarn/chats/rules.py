"""What an answer must look like: tool calls in the model's own format, a structure, reasoning before them.

Reasoning is free. It may be open in the prompt (the rule begins after its end marker), be written by the model (the
grammar allows it first) or be closed in the prompt. Non-goals: the formats of calls (kvarn.dialect); compiling.
"""

import re
from typing import NamedTuple

from kvarn.chats.tools import ToolUse
from kvarn.dialect import Dialect, grammar, opens_reasoning
from kvarn.dialect.lark import Lark
from kvarn.structured import Structure
from kvarn.structured.guidance import grammar_of

_START = re.compile(r"^start\b", re.MULTILINE)
_SETTINGS = re.compile(r"^%llguidance .*\n?", re.MULTILINE)
_GAP = r"/[ \t\r\n]{0,8}/"  # white space after reasoning


class Rule(NamedTuple):
    structure: Structure
    after: str | None = None  # the structure begins after this text


def rule_of(dialect: Dialect, use: ToolUse, structure: Structure | None, prompt: str) -> Rule | None:
    """None: the answer is free."""
    if use.required:
        structure = None  # a call comes instead of the text
    constrained = bool(use.tools) and (use.required or use.strict or structure is not None)
    if not constrained and structure is None:
        return None
    opened = opens_reasoning(dialect, prompt)
    after = dialect.reasoning[1].strip() if opened and dialect.reasoning else None
    reasons = dialect.reasoning is not None and not opened and not _closed(dialect, prompt)
    if structure is None:
        calls = grammar(dialect, use.tools, required=use.required, parallel=use.parallel, reasoning=reasons)
        return Rule(Structure("lark", calls), after)
    if not constrained and not reasons:
        return Rule(structure, after)
    return Rule(_either(dialect, use, structure, reasons), after)


def _either(dialect: Dialect, use: ToolUse, structure: Structure, reasons: bool) -> Structure:
    """Reasoning first, if the answer `reasons`; then calls, if there are tools, or the structure."""
    lark = Lark(dialect.control)
    rules = [_named("k_text", _SETTINGS.sub("", grammar_of(structure)))]
    start = "k_text"
    if use.tools:
        calls = grammar(dialect, use.tools, required=True, parallel=use.parallel, reasoning=False)
        rules.append(_named("k_calls", calls))
        start = f"({start} | k_calls)"
    if reasons and dialect.reasoning is not None:
        begin, end = (marker.strip() for marker in dialect.reasoning)
        start = f"({lark.text(begin)} {lark.until(end, '')} {_GAP})? {start}"
    return Structure("lark", "\n".join([lark.document(start), *rules]))


def _named(name: str, grammar: str) -> str:
    return _START.sub(name, grammar)


def _closed(dialect: Dialect, prompt: str) -> bool:
    """Whether the prompt ends with reasoning that is already closed."""
    return dialect.reasoning is not None and prompt.rstrip().endswith(dialect.reasoning[1].strip())
