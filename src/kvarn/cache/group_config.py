"""The sizes of one group of layers: what a placement is made from."""

from dataclasses import dataclass

from kvarn.cache.spec import LayerSpec, ceil_div
from kvarn.errors import KvarnError


@dataclass(frozen=True, slots=True)
class GroupConfig:
    spec: LayerSpec
    block_size: int
    n_blocks: int
    context: int  # longest sequence
    max_chunk: int  # most tokens of one sequence in one step
    watermarks: tuple[float, float] | None = None  # (high, low): when more than `high` of all is used, evict to `low`
    ahead: int = 0  # tokens that may be computed before they are committed
    tile: int = 1  # a fork, or a prompt that shares, begins at a multiple of this many tokens

    def __post_init__(self) -> None:
        marks = self.watermarks
        if marks is not None and (len(marks) != 2 or not 0 <= marks[1] <= marks[0] <= 1):
            raise KvarnError(f"watermarks {marks}: give (high, low), two fractions from 0 to 1 with low <= high")

    @property
    def context_blocks(self) -> int:
        return ceil_div(self.context, self.block_size)

    @property
    def pinned_blocks(self) -> int:
        """Leading blocks that are never removed. 0 without a window, because then no block is removed."""
        if self.spec.window is None:
            return 0
        return min(ceil_div(self.spec.pinned, self.block_size), self.context_blocks)

    @property
    def window_blocks(self) -> int:
        """Blocks that hold the window while the largest chunk is written, for any alignment.

        The first query of a chunk sees window - 1 tokens before it. The chunk's last token comes
        chunk - 1 after it. A ring of only one window would overwrite keys that the first rows still
        need. Blocks are removed at commit, so uncommitted tokens (`ahead`) need room too. So do tokens
        before the begin of a tile, which a fork sees."""
        rest = self.context_blocks - self.pinned_blocks
        if self.spec.window is None:
            return rest
        return min(rest, ceil_div(self.spec.window + self.max_chunk + self.ahead + self.tile - 3, self.block_size) + 1)
