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


class BrokenInvariant(AssertionError):
    """`check()` found state that only a bug can produce."""
