"""What the sequences of a benchmark consist of: random token ids, or a text that each begins at another place."""

from collections.abc import Sequence

import numpy as np

from kvarn.errors import KvarnError


class RandomIds:
    """The same for equal seeds. Sequence i's ids do not depend on how many others there are."""

    def __init__(self, vocab_size: int, longest: int, seed: int = 1) -> None:
        self.vocab_size, self.longest, self.seed = vocab_size, longest, seed
        self._known: dict[int, list[int]] = {}

    def __call__(self, sequence: int, n: int) -> list[int]:
        if sequence not in self._known:
            rng = np.random.default_rng((self.seed, sequence))
            self._known[sequence] = rng.integers(0, self.vocab_size, self.longest).tolist()
        return self._known[sequence][:n]


class TextIds:
    """Sequence i begins i/count of the way into the text, which starts over at its end."""

    def __init__(self, tokens: Sequence[int], count: int, longest: int) -> None:
        if len(tokens) < count:
            raise KvarnError(f"the text has {len(tokens)} tokens, too few for {count} different sequences")
        laps = -(-(longest + len(tokens)) // len(tokens))
        self._tokens = list(tokens) * laps
        self._stride = len(tokens) // count

    def __call__(self, sequence: int, n: int) -> list[int]:
        start = sequence * self._stride
        return self._tokens[start : start + n]
