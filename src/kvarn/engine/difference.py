"""Where and why our text differs from the nearest earlier one, as far as it is known. In tokens and facts.

`same_text` finds the one cause that needs no conversation. Those of chats come from the server.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """A reason beside those of the cache (cache/adoption.py): it is given instead of `differs`."""

    SAME_TEXT = "same text, other tokens"
    REWRITTEN = "turn rewritten"
    CHANGING_LINE = "a line that changes every time"
    SYSTEM = "system changed"
    TOOLS = "tools changed"


class Kind(StrEnum):
    """More about a cause."""

    # REWRITTEN
    DROPPED = "reasoning dropped by the template"
    NOT_SENT_BACK = "reasoning not sent back"
    OTHERWISE = "same message, written otherwise"
    # CHANGING_LINE: what the text that differs looks like
    CLOCK = "clock"
    DATE = "date"
    COUNTER = "counter"
    HASH = "hash"
    CLIENT_STAMP = "client stamp"


@dataclass(frozen=True, slots=True)
class Difference:
    """
    part        the part of the chat: system, tools, turn or template; empty if the prompt is no chat
    turn, role  of a turn: its index in the messages, and its role
    character   where our text differs; None: not known
    line        CHANGING_LINE: the line, as it is in our text
    tokens      SAME_TEXT: ours and theirs, up to where both texts have a boundary of tokens again
    """

    cause: Cause | None = None
    kind: Kind | None = None
    part: str = ""
    turn: int = 0
    role: str = ""
    character: int | None = None
    line: str = ""
    tokens: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


def same_text(
    ours: Sequence[tuple[int, bytes]], theirs: Sequence[tuple[int, bytes]]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Our tokens and theirs that spell the same text, up to where both have a boundary, if both go on with the same
    text after it, as far as it is known. Each token comes with its bytes."""
    ours, theirs = [each for each in ours if each[1]], [each for each in theirs if each[1]]
    text, other = (b"".join(raw for _, raw in tokens) for tokens in (ours, theirs))
    n = m = ahead = 0  # tokens taken; bytes that ours are ahead
    while not n or ahead:
        if ahead <= 0 and n < len(ours):
            ahead += len(ours[n][1])
            n += 1
        elif ahead > 0 and m < len(theirs):
            ahead -= len(theirs[m][1])
            m += 1
        else:
            break
    length = sum(len(raw) for _, raw in theirs[:m])
    if not m or ahead or text[:length] != other[:length]:  # `wor` is no other writing of `world`
        return None
    if n < len(ours) and m < len(theirs) and ours[n][0] != theirs[m][0]:
        return None
    return tuple(id for id, _ in ours[:n]), tuple(id for id, _ in theirs[:m])
