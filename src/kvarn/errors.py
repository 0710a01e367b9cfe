"""Errors that a caller can act on. Each message says what is wrong and what to do; none leaves state half changed."""


class KvarnError(ValueError):
    """Bad input or configuration: the base of every error kvarn raises on purpose."""


class UnknownSequence(KvarnError):
    """The sequence was never opened, or has been freed."""


class SequenceExists(KvarnError):
    """The sequence id is in use."""


class UnknownLayer(KvarnError):
    """The layer index is outside the model."""


class BadArray(KvarnError):
    """An array's rank, shape, dtype or memory order is not what the store takes."""


class BadStep(KvarnError):
    """The verbs were called out of order, or with no tokens, or with more than was reserved."""


class PastCapacity(KvarnError):
    """The sequence would outgrow its context, or the step the largest chunk."""


class OutOfBlocks(KvarnError):
    """Can never fit: more blocks are needed than the cache has. (What does not fit now: `reserve` answers False.)"""


class OutOfSequences(KvarnError):
    """Every row of the table is taken."""


class OutOfMemory(KvarnError):
    """The byte budget does not hold one sequence."""


class PromptTooLong(KvarnError):
    """The prompt leaves no room for an answer."""


class QueueFull(KvarnError):
    """As many requests wait as may: try again later."""


class BadModel(KvarnError):
    """A model file or folder is damaged, incomplete, or of a kind that kvarn does not run.

    The message stays one readable line even when it quotes a name of 64 KB or with line ends from a hostile file.
    """

    def __init__(self, message: str) -> None:
        line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in message)
        super().__init__(line if len(line) <= 600 else f"{line[:300]} ... {line[-250:]}")


class PullFailed(KvarnError):
    """A model could not be found or fetched."""


class BrokenInvariant(AssertionError):
    """`check()` found state that only a bug can produce."""
