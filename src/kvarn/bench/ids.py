"""Token ids for the sequences of a benchmark: random ids, or parts of a text."""

from collections.abc import Sequence

import numpy as np

from kvarn.errors import KvarnError
from kvarn.words import counted


class RandomIds:
    """The same ids for the same seed. The ids of sequence i do not depend on the number of sequences."""

    def __init__(self, vocab_size: int, longest: int, seed: int = 1) -> None:
        self.vocab_size, self.longest, self.seed = vocab_size, longest, seed
        self._sequences: dict[int, list[int]] = {}

    def __call__(self, sequence: int, n: int) -> list[int]:
        if sequence not in self._sequences:
            rng = np.random.default_rng((self.seed, sequence))
            self._sequences[sequence] = rng.integers(0, self.vocab_size, self.longest).tolist()
        return self._sequences[sequence][:n]


class TextIds:
    """Sequence i starts at i/count of the text. After the end of the text, its beginning follows."""

    def __init__(self, tokens: Sequence[int], count: int, longest: int) -> None:
        if len(tokens) < count:
            raise KvarnError(f"the text has {counted(len(tokens), 'token')}, too few for {count} different sequences")
        laps = -(-(longest + len(tokens)) // len(tokens))
        self._tokens = list(tokens) * laps
        self._stride = len(tokens) // count

    def __call__(self, sequence: int, n: int) -> list[int]:
        start = sequence * self._stride
        return self._tokens[start : start + n]
