"""The only place that imports llguidance, when the first structure is compiled.

Contract: `tokenizer_of` and `matcher_of` are the two objects of llguidance that the rest of the package uses.
Grammars are always Lark grammars with `no_forcing`: a mask then depends on the grammar and the answer's
bytes only, and llguidance never calls back into Python. Non-goals: limits of time and size (compiler.py).
"""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvarn.errors import BadStructure
from kvarn.structured.lark import embedded_schema, with_options
from kvarn.structured.structure import Structure, check_size
from kvarn.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Grammar = dict[str, str]  # as llguidance reads them
_NO_FORCING = '%llguidance {"no_forcing": true}'


class _Vocabulary:
    """What LLTokenizer reads: its TokenizerWrapper."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
        self.tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        if not eos_ids:  # llguidance needs an end token: one that the model does not have
            eos_ids = [len(self.tokens)]
            self.tokens.append(b"<end>")
        self.eos_ids = list(eos_ids)
        self.eos_token_id = self.eos_ids[0]
        self.special_token_ids = sorted({*tokenizer.control_ids, *self.eos_ids})

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("grammars are compiled with no_forcing")


def tokenizer_of(tokenizer: Tokenizer, eos_ids: Sequence[int]) -> "LLTokenizer":
    """Takes about a second for a large vocabulary."""
    from llguidance import LLTokenizer

    vocabulary = _Vocabulary(tokenizer, eos_ids)
    wrapper: Any = vocabulary
    return LLTokenizer(wrapper, eos_token=vocabulary.eos_ids)


def matcher_of(tokenizer: "LLTokenizer", grammars: Sequence[Grammar]) -> "LLMatcher":
    """Raises BadStructure if llguidance refuses the grammar, or would not enforce all of it."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=300_000,
        max_items_in_row=4_000,  # 1,000 optional properties; masks of 15,000 take 0.5 s each
        max_grammar_size=20_000,
        step_max_items=20_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, json.dumps({"grammars": grammars}), log_level=0, limits=limits)
    if matcher.is_error():
        raise BadStructure(_reason(matcher.get_error()))
    if warnings := matcher.get_grammar_warnings():
        raise BadStructure(_reason(warnings[0]))
    allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    if matcher.is_error():
        reason = matcher.get_error()
        empty = reason.startswith("NoExtension")
        raise BadStructure("no answer can follow this structure: it allows no token" if empty else _reason(reason))
    begun = matcher.deep_copy()
    begun.consume_token(int(allowed.argmax()))  # llguidance counts alternatives when one is taken
    if begun.is_error():
        raise BadStructure(_reason(begun.get_error()))
    return matcher


def grammars_of(structure: Structure) -> list[Grammar]:
    """The grammar of a structure, and those that it refers to by name. Each has its own names of rules."""
    if structure.kind != "either":
        return [{"lark_grammar": _lark_of(structure)}]
    parts = [{"name": f"part_{i}", "lark_grammar": _lark_of(part)} for i, part in enumerate(structure.parts)]
    either = " | ".join(f"@{part['name']}" for part in parts)
    return [{"lark_grammar": f"start: {either}\n{_NO_FORCING}\n"}, *parts]


def _lark_of(structure: Structure) -> str:
    kind, text = structure.kind, structure.text
    if kind == "json_object":
        text = f"start: {embedded_schema({'type': 'object'})}"
    elif kind == "json":
        text = f"start: {embedded_schema(json.loads(text))}"
    elif kind == "regex":
        text = f"start: /{_in_slashes(text)}/"
    elif kind == "choice":
        texts = " | ".join(json.dumps(each, ensure_ascii=False) for each in json.loads(text))
        text = f"start: CHOICE\nCHOICE: {texts}"  # a terminal: its masks are faster than those of a rule
    else:
        text = with_options(_from_gbnf(text) if kind == "gbnf" else text)
    return f"{text}\n{_NO_FORCING}\n"


def _from_gbnf(grammar: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        text = gbnf_to_lark(grammar)
    except RecursionError:
        raise BadStructure("the grammar is nested too deeply") from None
    except Exception as error:  # noqa: BLE001 (a bad grammar raises errors of any kind)
        raise BadStructure(f"the grammar is not GBNF: {error}") from None
    check_size(text, "the grammar in Lark's syntax")
    return text


def _in_slashes(pattern: str) -> str:
    from llguidance import regex_to_lark

    return regex_to_lark(pattern, use_ascii="")


def _reason(message: str) -> str:
    """One line of llguidance's message, which may quote the grammar and point into it."""
    lines = [line.strip() for line in re.split(r"\n\s*\d+ \| ", message)[0].splitlines()]
    text = " ".join([lines[0], *(line for line in lines[1:] if line.startswith("error:"))])
    text = text.split("failed to compile JSON schema: ")[-1]
    text = re.sub(r"^at \d+\(\d+\): invalid regex .*\(in regex\): ", "", text)
    if found := re.match(r"Unimplemented keys: (\[.*\])", text):
        names = ", ".join(map(json.dumps, json.loads(found[1])))
        return f"the schema has {names}, which cannot be enforced: remove it"
    if found := re.match(r"Unknown format: (.*)", text):
        return f'the schema has "format": {json.dumps(found[1])}, which cannot be enforced: remove it'
    if re.match(r"Parser Error: Current row has \d+ items", text):
        return "the structure has too many alternatives or optional parts in one place: use fewer"
    if text.startswith("oneOf constraints"):
        return "the schema has oneOf with alternatives that may overlap, which cannot be enforced: use anyOf"
    return f"this structure cannot be enforced: {text}"
