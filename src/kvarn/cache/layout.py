"""The layout axis: the order of the bytes in one block.

A layout gives only strides. The address of a cell is (block, panel, head, slot, unit). The position
inside a block is panel * panel_size + slot. Scales have the same axes as the units of their rows. All
layouts have these five axes, so one kernel reads all of them, and no data is ever reshaped. Members
are in `layouts/`, one file each.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvarn.cache.spec import LayerSpec


class Strides(NamedTuple):
    """Counted in units of the row, not in bytes."""

    block: int
    panel: int
    head: int
    slot: int
    unit: int


@dataclass(frozen=True, slots=True)
class BlockShape:
    """One block of one layer's K or V, or of their scales."""

    heads: int  # stored heads
    units: int  # per row
    block_size: int
    panel_size: int

    @property
    def n_panels(self) -> int:
        return self.block_size // self.panel_size

    @property
    def total(self) -> int:
        """Units per block."""
        return self.block_size * self.heads * self.units


class Layout(Protocol):
    name: str

    def refusal(self, spec: LayerSpec, block_size: int) -> str | None:
        """Why this layout cannot store such blocks; None if it can."""

    def stored_heads(self, spec: LayerSpec) -> int: ...

    def panel_size(self, block_size: int) -> int: ...

    def k_strides(self, shape: BlockShape) -> Strides: ...

    def v_strides(self, shape: BlockShape) -> Strides: ...
