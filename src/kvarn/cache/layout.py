"""The layout axis: in which order the bytes of one block lie.

A layout is strides and nothing else. Cells are addressed by (block, panel, head, slot, unit); scales lie like the units
of their rows. The position inside a block is panel * panel_size + slot. Because every layout is strides over the same
five axes, one kernel reads all of them and a store is never reshaped. Members live in `layouts/`, one file each.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvarn.cache.spec import LayerSpec


class Strides(NamedTuple):
    """In units of the row."""

    block: int
    panel: int
    head: int
    slot: int
    unit: int


@dataclass(frozen=True, slots=True)
class BlockShape:
    """One block of one layer's K or V, or of the scales of one: n_panels * panel_size slots, `heads` stored heads."""

    heads: int
    units: int  # of a row
    block_size: int
    panel_size: int

    @property
    def n_panels(self) -> int:
        return self.block_size // self.panel_size

    @property
    def total(self) -> int:
        """Units of a block."""
        return self.block_size * self.heads * self.units


class Layout(Protocol):
    name: str

    def refusal(self, spec: LayerSpec, block_size: int) -> str | None:
        """Why this layout cannot hold such blocks; None when it can."""

    def stored_heads(self, spec: LayerSpec) -> int: ...

    def panel_size(self, block_size: int) -> int: ...

    def k_strides(self, shape: BlockShape) -> Strides: ...

    def v_strides(self, shape: BlockShape) -> Strides: ...
