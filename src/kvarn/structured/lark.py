"""JSON schemas inside of grammars in llguidance's variant of Lark's syntax.

Contract: every schema that llguidance will read is checked and gets kvarn's options. So the text is cut into the same
lexemes as llguidance cuts it: %json in a text, an expression, a comment or another JSON value is no schema. What
llguidance's lexer refuses need not be cut well.
"""

import json
import re
from typing import Any

from kvarn.errors import BadStructure
from kvarn.structured.schemas import check_schema, simplified

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,8}"  # between two parts of JSON: a model cannot write white space for ever
_OPTIONS = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
_MOST_RULES = 2000  # of a grammar: llguidance follows a chain of rules by recursion
_RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_][^\n]*:", re.MULTILINE)
_LEXEME = re.compile(
    r"""(?:\#|//)[^\n]*             # a comment
    | "(?:\\.|[^"\\\n])*"           # a text
    | /(?:\\.|[^/\\])+/             # an expression
    | <[^<>\s]+>                    # a token
    | (?P<value>%json|%regex|%llguidance)[ \t\r\n]*
    | (?P<reference>@[A-Za-z0-9_-]+)
    | (?P<open>["/])""",
    re.VERBOSE,
)
_DECODER = json.JSONDecoder()


def embedded_schema(schema: Any, where: str = "the schema") -> str:
    """A JSON schema as a term of a Lark grammar. Raises BadStructure for keywords that cannot be enforced."""
    if schema is False:
        raise BadStructure(f"{where} is false, which no answer can follow: give another one")
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise BadStructure(f"{where} is no JSON schema: give an object")
    check_schema(schema, where)
    return "%json " + json.dumps({**simplified(schema), "x-guidance": _OPTIONS}, ensure_ascii=False)


def with_options(grammar: str) -> str:
    """The grammar with kvarn's options in every schema after %json. All schemas are checked."""
    if len(_RULE.findall(grammar)) > _MOST_RULES:
        raise BadStructure(f"the grammar has too many rules: give at most {_MOST_RULES:,}")
    parts, at, kept = [], 0, 0
    while found := _LEXEME.search(grammar, at):
        at = found.end()
        if found["open"]:
            raise BadStructure(f"the grammar has a text or an expression that does not end: {found[0]} is missing")
        if found["reference"]:
            raise BadStructure(f"the grammar has {found[0]}, which refers to another grammar: use a rule")
        if found["value"]:
            value, at = _value(found["value"], grammar, at)
            if found["value"] == "%json":
                parts += [grammar[kept : found.start()], _term(value)]
                kept = at
    return "".join([*parts, grammar[kept:]])


def _value(name: str, grammar: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(grammar, at)
    except (ValueError, RecursionError):
        what = "a schema after %json" if name == "%json" else f"the value after {name}"
        raise BadStructure(f"{what} is not JSON, or is nested too deeply") from None


def _term(schema: Any) -> str:
    if isinstance(schema, dict) and schema.get("x-guidance") == _OPTIONS:  # kvarn has written it
        del schema["x-guidance"]
        return embedded_schema(schema)
    return embedded_schema(schema, "a schema after %json")
