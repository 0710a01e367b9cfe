"""What a layer's attention may see.

`visible` is the one predicate of the project: kernels mask with it, placements evict with it, `adopt` and `rewind`
ask it which blocks must still be there. Works on integers and on arrays alike. Non-goal: where anything is stored.
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
    window: int | None = None  # a query sees itself and the window - 1 tokens before it; None: all of them
    pinned: int = 0  # first tokens that stay visible outside the window

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
        """This spec under a user's window: the smaller window rules."""
        windows = [w for w in (self.window, window) if w is not None]
        return replace(self, window=min(windows, default=None), pinned=max(self.pinned, pinned))

    def floor(self, pos: Any) -> Any:
        """The lowest position inside the window of a query at `pos` (below 0 while the window is not yet full)."""
        return 0 if self.window is None else pos - self.window + 1

    def visible(self, q: Any, k: Any) -> Any:
        """May a query at position q see the key at position k?

        window 3, pinned 1:    k 0 1 2 3 4 5
                           q 4   x . x x x .
        """
        return (k <= q) & ((k >= self.floor(q)) | (k < self.pinned))

    def seen(self, first: int, length: int) -> int:
        """Keys below `length` that some query at positions first and on sees: those in its window, and the pinned."""
        start: int = max(self.floor(first), 0)
        return length - start + min(self.pinned, start)

    def dead(self, first: int, last: int, length: int) -> bool:
        """No query at position `length` or later sees anything in [first, last].

        What a query does not see below itself is one interval, so looking at the two ends is enough; the first query
        that can see a key stands at its position, or at `length` if that is later."""
        return not (self.visible(max(length, last), last) or self.visible(max(length, first), first))


def groups(layers: Sequence[LayerSpec]) -> list[tuple[LayerSpec, list[int]]]:
    """Layers of equal spec share one table: [(spec, layer indices)] in order of first appearance."""
    found: dict[LayerSpec, list[int]] = {}
    for index, spec in enumerate(layers):
        found.setdefault(spec, []).append(index)
    return list(found.items())


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def align(n: int, to: int) -> int:
    return ceil_div(n, to) * to
