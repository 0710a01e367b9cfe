"""Errors that a caller can handle. A message says what is wrong and what to do. A call that raises changes nothing."""


def printable(text: str, longest: int = 600) -> str:
    """One line for a terminal: without control characters, escapes and marks that reorder text, and not too long."""
    text = text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


class KvarnError(ValueError):
    """Bad input or configuration. The base class of the errors in this module."""


class UnknownSequence(KvarnError):
    """The sequence was never opened, or has been freed."""


class SequenceExists(KvarnError):
    """The sequence id is in use."""


class UnknownLayer(KvarnError):
    """The layer index is outside the model."""


class BadArray(KvarnError):
    """An array's rank, shape, dtype or memory order is not what the store takes."""


class BadStep(KvarnError):
    """The verbs were called in the wrong order, with no tokens, or with more tokens than were reserved."""


class PastCapacity(KvarnError):
    """The sequence is longer than its context, or the step is longer than the largest chunk."""


class OutOfBlocks(KvarnError):
    """The sequence needs more blocks than the cache has, so it can never fit. (If there is no room only now, `reserve`
    returns False.)"""


class OutOfSequences(KvarnError):
    """All sequences (max_seqs) are in use."""


class OutOfMemory(KvarnError):
    """The byte budget does not hold one sequence."""


class PromptTooLong(KvarnError):
    """The prompt leaves no room for an answer."""


class QueueFull(KvarnError):
    """The queue is full: try again later."""


class BadModel(KvarnError):
    """A model file or folder is damaged, incomplete, or not supported.

    The message is always one short line, even if it quotes a very long name or line ends from a hostile file.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class BadSnapshot(KvarnError):
    """A snapshot is damaged, no snapshot, or of another model or arithmetic. One line. Nothing was restored."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, 600))


class NoRoomNow(KvarnError):
    """The cache has no room for a snapshot while other requests run: try again later."""


class BadStructure(KvarnError):
    """A schema, regular expression or grammar is damaged, too large, or asks for what cannot be enforced. One line."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(" ".join(message.split())))


class StructuresBusy(KvarnError):
    """Other structures are being compiled, and they take long: try again later."""


class PullFailed(KvarnError):
    """A model could not be found or fetched."""


class BadLogits(ArithmeticError):
    """The model computed logits that are not finite numbers. Its weights are damaged; no request is at fault."""


class BrokenInvariant(AssertionError):
    """`check()` found state that only a bug can produce."""
