"""Text from outside (a model, a file) that is safe to print on a terminal.

Removed are the characters that control a terminal or that reorder or hide text. Line ends, tabs and every
visible character stay, also those that this Python's Unicode tables do not know yet. Non-goal: output to
files and pipes, which get the text as it is.
"""

_SHOWN_AS = "\N{REPLACEMENT CHARACTER}"
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0)]  # C0, delete, C1 (0x9B alone begins an escape sequence)
_REORDERING = [*range(0x202A, 0x202F), *range(0x2066, 0x2070)]  # bidirectional embeddings, overrides, isolates
_HIDDEN = [0xFEFF, *range(0xFFF9, 0xFFFC), *range(0xE0000, 0xE0080)]  # byte order mark, annotations, tags
# Ordinary in some languages, and nothing to see: marks of direction, spaces without width. The joiners stay, because
# letters and emoji need them.
_LEFT_OUT = [ord("\r"), 0x061C, 0x200E, 0x200F, 0x200B, 0x2060]
_SURROGATES = range(0xD800, 0xE000)  # no encoding has them
_TABLE: dict[int, str | None] = dict.fromkeys([*_CONTROLS, *_REORDERING, *_HIDDEN, *_SURROGATES], _SHOWN_AS)
_TABLE |= dict.fromkeys(_LEFT_OUT) | {ord("\n"): "\n", ord("\t"): "\t", 0x2028: "\n", 0x2029: "\n"}


def safe(text: str) -> str:
    """The text without control characters, except line ends and tabs. Carriage returns, marks of direction and spaces
    without width are left out. Other characters that are removed are shown as a replacement character."""
    return text.translate(_TABLE)


def escaped(json_text: str) -> str:
    """JSON in which the characters that `safe` removes are escapes. Spaces and line ends between values stay."""
    return "".join(_escape(c) if ord(c) in _TABLE and c != "\n" else c for c in json_text)


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
