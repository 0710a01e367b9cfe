"""The blocks and the lengths of one sequence in one group of layers."""

NO_HOLE = range(0)


class Residency:
    __slots__ = ("blocks", "changed", "committed", "end", "firsts", "hole", "length", "reserved", "writable")

    def __init__(self) -> None:
        self.blocks: list[int] = []  # physical blocks, in ascending position
        self.firsts: list[int] = []  # position of each block's slot 0
        self.end = 0  # index of the next logical block
        self.committed = 0  # tokens whose ids were committed
        self.length = 0  # tokens that are written, or will be by a launched step
        self.reserved = 0  # tokens after the next step
        self.writable = 0  # positions below this can be reserved without calling the placement's hooks
        self.hole = NO_HOLE  # positions whose cells were never written: those of a restored text outside of its window
        self.changed = 0  # the table on the device does not have the entries from here on

    def index(self, logical: int) -> int:
        """Entry of a logical block in `blocks`. The block and all later ones must be resident."""
        return len(self.blocks) - (self.end - logical)

    def append(self, block: int, block_size: int) -> None:
        self.blocks.append(block)
        self.firsts.append(self.end * block_size)
        self.end += 1

    def replace(self, entry: int, block: int) -> None:
        self.blocks[entry] = block
        self.changed = min(self.changed, entry)

    def remove(self, start: int, stop: int) -> list[int]:
        """Remove entries start..stop and return their blocks."""
        removed = self.blocks[start:stop]
        del self.blocks[start:stop], self.firsts[start:stop]
        self.changed = min(self.changed, start)
        return removed
