"""Which tokens of a prompt came from a snapshot, for explanations.

A source is a text that was restored. A prompt of the same salt that begins like it reused its cells, as far as it
reused anything. If it reused less than both texts share, the rest is gone and will be computed: from then on, the
source counts only up to there.
"""

from typing import NamedTuple

from kvarn.cache.prefix import common

MOST = 64  # sources that are remembered; the oldest are forgotten first


class Source(NamedTuple):
    name: str
    tokens: int
    seconds: float  # to read and restore all of it


class Sources:
    def __init__(self) -> None:
        self._texts: dict[tuple[bytes, str], tuple[list[int], float]] = {}

    def add(self, salt: bytes, tokens: list[int], name: str, seconds: float) -> None:
        self._texts.pop((salt, name), None)
        self._texts[salt, name] = tokens, seconds
        while len(self._texts) > MOST:
            del self._texts[next(iter(self._texts))]

    def clear(self) -> None:
        """The cache was emptied."""
        self._texts.clear()

    def of(self, salt: bytes, prompt: list[int], reused: int) -> Source | None:
        """The source that gave most of the reused tokens of a prompt."""
        best: Source | None = None
        for (owner, name), (tokens, seconds) in list(self._texts.items()):
            shared = common(tokens, prompt[:-1]) if owner == salt else 0
            if not shared:
                continue
            if reused < shared:
                self._texts[owner, name] = tokens[:reused], seconds
            n = min(shared, reused)
            if n and (best is None or n > best.tokens):
                best = Source(name, n, seconds)
        return best
