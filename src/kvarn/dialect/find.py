"""Finds the dialect of a model from its chat template.

A template is not trusted: `find` renders through the caller's function, which may limit time and memory. Whatever goes
wrong there, the result is a dialect: that of the family, or the generic one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvarn.dialect.derive import Rendered, derived, reads, reasoning
from kvarn.dialect.dialect import GENERIC, Dialect
from kvarn.dialect.families import family_of
from kvarn.text.chat import ChatTemplate


def find(
    template: Callable[..., str] | ChatTemplate,
    *,
    source: str = "",
    control: Mapping[str, int] | None = None,
    eos: Sequence[str] = (),
) -> Dialect:
    """`template`: a chat template, or the `render` of one; then `source` is its source. `control`: the texts and ids of
    the tokenizer's control tokens. `eos`: the texts of the tokens that end a turn."""
    if isinstance(template, ChatTemplate):
        source = template.strings[0]
        rendered = Rendered(template.render)
    else:
        rendered = Rendered(template)
    dialect = _calls(rendered, source)
    if dialect.reasoning is None:
        dialect = replace(dialect, reasoning=reasoning(rendered, source))
    section, call = (_before(marker, eos) for marker in (dialect.section[1], dialect.call[1]))
    dialect = replace(dialect, section=(dialect.section[0], section), call=(dialect.call[0], call))
    return dialect.with_control(control or {})


def _before(marker: str, eos: Sequence[str]) -> str:
    """An end marker without the end of the turn, which the template wrote after it."""
    return marker[: min((at for text in eos if text and (at := marker.find(text)) >= 0), default=len(marker))]


def _calls(rendered: Rendered, source: str) -> Dialect:
    family = family_of(source) if "tool" in source else None
    if family is not None and family.fixed:
        as_text = not reads(family.dialect, rendered.calls(1, False), 1) and reads(
            family.dialect, rendered.calls(1, True), 1
        )
        return replace(family.dialect, arguments_as_text=as_text)
    found = derived(rendered)
    if found is not None:
        known = family is not None and any(family.marks[0] in marker for marker in found.markers)
        return replace(found, name=family.dialect.name) if family is not None and known else found
    shown = rendered.calls(1, False) or rendered.calls(1, True)
    return family.dialect if family is not None and (not shown or reads(family.dialect, shown, 1)) else GENERIC
