"""How models write tool calls and reasoning: found from the chat template, read from answers, forced by grammars."""

from kvarn.dialect.deltas import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Delta,
    Malformed,
    Reasoning,
    joined,
)
from kvarn.dialect.dialect import GENERIC, Dialect, Tool, opens_reasoning
from kvarn.dialect.find import find
from kvarn.dialect.generic import instructed
from kvarn.dialect.grammar import grammar
from kvarn.dialect.parser import Parser

__all__ = [
    "GENERIC",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "Content",
    "Delta",
    "Dialect",
    "Malformed",
    "Parser",
    "Reasoning",
    "Tool",
    "find",
    "grammar",
    "instructed",
    "joined",
    "opens_reasoning",
]
