"""What an answer must look like: a JSON schema, a regular expression, a list of choices, or a grammar.

Contract: a Structure is a frozen key; equal structures share what was compiled. `schema_of` and the other
makers check types and sizes and raise BadStructure. Non-goals: whether a schema can be enforced
(compiler.py), names of HTTP fields (fields.py).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvarn.errors import BadStructure

MOST_BYTES = 256 << 10  # of a schema, a regular expression, a grammar, or all choices
MOST_NESTING = 64  # of the values in a schema
MOST_CHOICES = 10_000
KINDS = ("json", "json_object", "regex", "choice", "lark", "gbnf", "either")


def check_size(text: str, where: str) -> None:
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise BadStructure(f"{where} has a lone surrogate, which is not a character: remove it") from None
    if n_bytes > MOST_BYTES:
        raise BadStructure(f"{where} has {n_bytes:,} bytes: give at most {MOST_BYTES:,}")


@dataclass(frozen=True)
class Structure:
    """
    kind    json (a schema), json_object, regex, choice (a JSON list of texts), lark, gbnf or either
    text    the schema as JSON, the regular expression, the choices or the grammar; empty for json_object and either
    parts   of which an answer follows one; only of either
    """

    kind: str
    text: str = ""
    parts: tuple["Structure", ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadStructure(f"there is no structure {self.kind!r}: give one of {', '.join(KINDS)}")
        if not isinstance(self.text, str):
            raise BadStructure(f"a structure of kind {self.kind} is a text, not {type(self.text).__name__}")
        check_size(self.text, self.kind)


JSON_OBJECT = Structure("json_object")


def schema_of(schema: Any, where: str = "json_schema") -> Structure:
    """From a dictionary, a boolean, JSON text, or a class of pydantic. `where` names it in errors."""
    if callable(getattr(schema, "model_json_schema", None)):
        try:
            schema = schema.model_json_schema()
        except Exception as error:  # noqa: BLE001 (pydantic's and the class's own)
            raise BadStructure(f"{where}: pydantic makes no JSON schema of this class: {error}") from None
    if isinstance(schema, str | bytes):
        schema = _parsed(schema, where)
    if schema is False:
        raise BadStructure(f"{where} is false, which no answer can follow: give another schema")
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise BadStructure(f"{where} is {type(schema).__name__}: give a JSON schema, which is an object")
    check_nesting(schema, where)
    try:
        # The order of properties stays: it is the order in which the answer has them.
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadStructure(f"{where} is not JSON: {error}") from None
    check_size(text, where)
    return Structure("json", text)


def either_of(*parts: Structure) -> Structure:
    """The answer follows one of them. None of them is an either itself."""
    return Structure("either", parts=parts)


def regex_of(pattern: Any, where: str = "regex") -> Structure:
    return Structure("regex", _text(pattern, where))


def choice_of(choices: Any, where: str = "choice") -> Structure:
    if isinstance(choices, str | bytes | Mapping) or not isinstance(choices, Sequence) or not choices:
        raise BadStructure(f"{where} must be a list of texts that is not empty")
    if not all(isinstance(each, str) and each for each in choices):
        raise BadStructure(f"{where} must have only texts that are not empty")
    if len(choices) > MOST_CHOICES:
        raise BadStructure(f"{where} has {len(choices):,} texts: give at most {MOST_CHOICES:,}")
    return Structure("choice", json.dumps(list(dict.fromkeys(choices)), ensure_ascii=False))


def grammar_of(grammar: Any, where: str = "grammar") -> Structure:
    """A grammar in Lark's syntax, or in GBNF, which has `::=`."""
    text = _text(grammar, where)
    return Structure("gbnf" if "::=" in text else "lark", text)


def check_nesting(value: Any, where: str) -> None:
    """Raise if lists and objects are nested too deeply, without recursion."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_NESTING:
            raise BadStructure(f"{where} is nested more than {MOST_NESTING} levels deep: make it flatter")
        inner: list[Any] = []
        for each in level:
            if isinstance(each, Mapping):
                if not all(isinstance(key, str) for key in each):
                    raise BadStructure(f"{where} is not JSON: a key is not a text")
                inner += each.values()
            elif isinstance(each, list | tuple):
                inner += each
        if len(inner) > MOST_BYTES:
            raise BadStructure(f"{where} has too many parts: give at most {MOST_BYTES:,} bytes")
        level = [each for each in inner if isinstance(each, Mapping | list | tuple)]


def _parsed(text: str | bytes, where: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise BadStructure(f"{where} is nested more than {MOST_NESTING} levels deep: make it flatter") from None
    except ValueError as error:
        raise BadStructure(f"{where} is not JSON: {error}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadStructure(f"{where} must be a text that is not empty")
    check_size(value, where)
    return value
