"""Writes rules in llguidance's variant of Lark. Control tokens are written by their ids."""

import json
import re
from collections.abc import Sequence
from typing import Any

# A model must not write white space without end where JSON allows any amount.
GUIDANCE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}", "lenient": False, "coerce_one_of": False}


class Lark:
    def __init__(self, control: Sequence[tuple[str, int]]) -> None:
        self._ids = dict(control)
        self._rules: dict[str, str] = {}
        self._known: dict[str, str] = {}
        longest = sorted(self._ids, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest)) + ")") if longest else None

    def rule(self, kind: str, body: str, options: str = "") -> str:
        """The name of a rule with this body."""
        made = self._known.get(f"{options}: {body}")
        if made is None:
            made = f"{kind}_{len(self._rules)}"
            self._rules[f"{made}{options}"] = body
            self._known[f"{options}: {body}"] = made
        return made

    def text(self, text: str) -> str:
        """This text."""
        parts = self._split.split(text) if self._split else [text]
        return " ".join(self._one(part) for part in parts if part)

    def plain(self, text: str) -> str:
        """This text, without control tokens."""
        return json.dumps(text, ensure_ascii=False)

    def _one(self, part: str) -> str:
        return f"<[{self._ids[part]}]>" if part in self._ids else self.plain(part)

    def trigger(self, marker: str) -> tuple[str, str]:
        """A marker as its first tag, and the rest."""
        for token in self._ids:
            if marker.lstrip().startswith(token):
                return token, marker.lstrip()[len(token) :]
        found = re.match(r"\s*(<[^<>]*>|\[[A-Z_]+\]|\S+)(.*)", marker, re.DOTALL)
        assert found is not None, "a marker has text"
        return found.group(1), found.group(2)

    def until(self, marker: str, rest: str, text: str = "/(.|\\n)*/") -> str:
        """A text, then the marker, which is not in the text, then the rest."""
        lead = marker.strip() if marker.strip() in self._ids else ""
        if lead:
            body = f"{text} {self._one(lead)}"
        else:
            body = self.rule("until", text, f"[suffix={json.dumps(marker, ensure_ascii=False)}]")
        return f"{body} {self.text(rest)}".rstrip()

    def json(self, schema: Any) -> str:
        return self.rule("value", f"%json {json.dumps({**schema, 'x-guidance': GUIDANCE}, ensure_ascii=False)}")

    def document(self, start: str) -> str:
        lines = [f"start: {' '.join(start.split(' '))}", *(f"{name}: {body}" for name, body in self._rules.items())]
        return "\n".join(lines) + "\n"
