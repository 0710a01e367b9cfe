"""Where one sequence is in one group of layers."""


class Residency:
    """Where one sequence is: its resident blocks in ascending position, and how far it has come."""

    __slots__ = ("blocks", "changed", "committed", "end", "firsts", "length", "reserved", "writable")

    def __init__(self) -> None:
        self.blocks: list[int] = []  # physical
        self.firsts: list[int] = []  # position of each block's slot 0
        self.end = 0  # logical blocks placed so far: the next one has this index
        self.committed = 0  # tokens whose ids are known
        self.length = 0  # tokens that are written, or are by a step that was launched
        self.reserved = 0  # tokens after the step that is prepared next
        self.writable = 0  # positions below this can be reserved without a further look
        self.changed = 0  # entries from here on are new to the table

    def index(self, logical: int) -> int:
        """Where a block that is at or behind the write position stands in `blocks`."""
        return len(self.blocks) - (self.end - logical)

    def append(self, block: int, block_size: int) -> None:
        self.blocks.append(block)
        self.firsts.append(self.end * block_size)
        self.end += 1

    def replace(self, entry: int, block: int) -> None:
        self.blocks[entry] = block
        self.changed = min(self.changed, entry)

    def remove(self, start: int, stop: int) -> list[int]:
        """Take entries out of the list; the table is told from where it changed."""
        taken = self.blocks[start:stop]
        del self.blocks[start:stop], self.firsts[start:stop]
        self.changed = min(self.changed, start)
        return taken
