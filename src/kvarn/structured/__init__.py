"""Structured output: answers that follow a JSON schema, a regular expression, a list of choices or a grammar."""

from kvarn.errors import BadStructure
from kvarn.structured.compiler import Compiled, Compiler
from kvarn.structured.fields import from_gbnf, from_json_schema, from_response_format, from_structured_outputs
from kvarn.structured.lark import embedded_schema
from kvarn.structured.structure import JSON_OBJECT, Structure, choice_of, either_of, grammar_of, regex_of, schema_of

__all__ = [
    "JSON_OBJECT",
    "BadStructure",
    "Compiled",
    "Compiler",
    "Structure",
    "choice_of",
    "either_of",
    "embedded_schema",
    "from_gbnf",
    "from_json_schema",
    "from_response_format",
    "from_structured_outputs",
    "grammar_of",
    "regex_of",
    "schema_of",
]
