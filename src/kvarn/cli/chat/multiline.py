'''Messages of several lines, as they are typed: a backslash at the end of a line, or """ around the text.'''

QUOTES = '"""'


class Quoted(str):
    """A message that was typed in quotes. It is never a command."""

    __slots__ = ()


def next_line(text: str) -> str | None:
    """The text with a new line begun, if Enter does that here. None: Enter sends the text."""
    if text.lstrip().startswith(QUOTES):
        return f"{text}\n" if _content(text) is None else None
    return f"{text[:-1]}\n" if text.endswith("\\") else None


def message(text: str) -> str:
    """What is sent."""
    content = _content(text)
    return text.strip() if content is None else Quoted(content)


def _content(text: str) -> str | None:
    """The text between the quotes. None if they are missing or still open."""
    text = text.strip()
    if not text.startswith(QUOTES) or len(text) < 2 * len(QUOTES) or not text.endswith(QUOTES):
        return None
    return text[len(QUOTES) : -len(QUOTES)].strip("\n")
