"""Columns: 32-slot panels, head-major inside; K transposed [head][dim][slot], V plain [head][slot][dim].

For CPUs with a vector unit, which reads K and V in place: a vector of K holds slots of one dimension, a
vector of V holds dimensions of one slot. The layout `panel` transposes V instead, for a matrix unit.
"""

from kvarn.cache.layout import BlockShape, Strides
from kvarn.cache.layouts.panel import PANEL, Panel


class Columns(Panel):
    name = "columns"

    def k_strides(self, shape: BlockShape) -> Strides:
        return self.v_strides(shape)._replace(slot=1, unit=PANEL)

    def v_strides(self, shape: BlockShape) -> Strides:
        return super().k_strides(shape)
