"""Which keys a query of a layer may see.

`LayerSpec.visible` is the only definition. Kernels mask keys with it. Placements use it to find blocks
that no query can see. `adopt` and `rewind` use it to decide which blocks must be resident. Its arguments
are integers or arrays. Non-goal: where keys are stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvarn.errors import KvarnError


@dataclass(frozen=True, slots=True)
class LayerSpec:
    n_heads: int
    n_kv_heads: int
    k_dim: int  # of a head's key and query
    v_dim: int  # of a head's value and output
    window: int | None = None  # a query sees itself and window - 1 tokens before it; None: all tokens before it
    pinned: int = 0  # this many first tokens are visible outside the window too

    def __post_init__(self) -> None:
        for name in ("n_heads", "n_kv_heads", "k_dim", "v_dim"):
            if getattr(self, name) < 1:
                raise KvarnError(f"LayerSpec.{name} is {getattr(self, name)}; it must be at least 1")
        if self.n_heads % self.n_kv_heads:
            raise KvarnError(f"{self.n_heads} query heads cannot share {self.n_kv_heads} KV heads evenly")
        if self.window is not None and self.window < 1:
            raise KvarnError(f"the window is {self.window}; it must be at least 1 (leave it out for none)")
        if self.pinned < 0:
            raise KvarnError(f"{self.pinned} pinned tokens; it must be 0 or more")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.n_heads // self.n_kv_heads

    def narrowed(self, window: int | None, pinned: int) -> "LayerSpec":
        """This spec with the user's window and pinned tokens: the smaller window and the larger pin apply."""
        windows = [w for w in (self.window, window) if w is not None]
        return replace(self, window=min(windows, default=None), pinned=max(self.pinned, pinned))

    def floor(self, pos: Any) -> Any:
        """The lowest position in the window of a query at `pos`. Negative while the window is not full."""
        return 0 if self.window is None else pos - self.window + 1

    def visible(self, q: Any, k: Any) -> Any:
        """May a query at position q see the key at position k?

        window 3, pinned 1:    k 0 1 2 3 4 5
                           q 4   x . x x x .
        """
        return (k <= q) & ((k >= self.floor(q)) | (k < self.pinned))

    def seen(self, first: int, length: int) -> int:
        """How many keys below `length` the queries at positions `first` and later see."""
        start: int = max(self.floor(first), 0)
        return max(length - start, 0) + min(self.pinned, start, length)

    def dead(self, first: int, last: int, length: int) -> bool:
        """Whether no query at position `length` or later sees a key in [first, last].

        The keys that a query does not see form one interval, so checking both ends is enough. For each
        end it is enough to check the first query that comes at or after it."""
        return not (self.visible(max(length, last), last) or self.visible(max(length, first), first))


def groups(layers: Sequence[LayerSpec]) -> list[tuple[LayerSpec, list[int]]]:
    """Group layers by equal spec: [(spec, layer indices)] in order of first appearance."""
    indices: dict[LayerSpec, list[int]] = {}
    for index, spec in enumerate(layers):
        indices.setdefault(spec, []).append(index)
    return list(indices.items())


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def align(n: int, to: int) -> int:
    return ceil_div(n, to) * to
