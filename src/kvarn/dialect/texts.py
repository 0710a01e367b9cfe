"""Text on its way out, without the white space where it touches a call or reasoning."""

from collections.abc import Callable

from kvarn.dialect.deltas import Content, Delta, Reasoning
from kvarn.dialect.source import SPACE


class Text:
    def __init__(self, kind: type[Content] | type[Reasoning], say: Callable[[Delta], None], after: bool) -> None:
        """`after`: it follows a call or reasoning."""
        self._kind = kind
        self._say = say
        self._drop = after
        self._spaces: list[str] = []

    def add(self, text: str) -> None:
        body = text.rstrip(SPACE)
        if not body:
            self._spaces.append(text)
            return
        before = body.lstrip(SPACE) if self._drop else "".join(self._spaces) + body
        self._drop = False
        self._spaces = [text[len(body) :]]
        self._say(self._kind(before))

    def end(self) -> None:
        """The answer ends here."""
        spaces = "".join(self._spaces)
        if spaces and not self._drop:
            self._say(self._kind(spaces))
