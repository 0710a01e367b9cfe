"""Panel: 32-slot panels, head-major inside; K [head][slot][dim], V transposed [head][dim][slot].

For CPUs with a matrix unit. The unit reads a panel of V in place and multiplies it by 32 probabilities.
"""

from kvarn.cache.layout import BlockShape, Strides
from kvarn.cache.spec import LayerSpec

PANEL = 32


class Panel:
    name = "panel"

    def refusal(self, spec: LayerSpec, block_size: int) -> str | None:
        if block_size % PANEL:
            return f"a panel holds {PANEL} slots, a block {block_size}: use block size {PANEL} or more, or head-major"
        return None

    def stored_heads(self, spec: LayerSpec) -> int:
        return spec.n_kv_heads

    def panel_size(self, block_size: int) -> int:
        return PANEL

    def k_strides(self, shape: BlockShape) -> Strides:
        head = PANEL * shape.units
        return Strides(block=shape.total, panel=shape.heads * head, head=head, slot=shape.units, unit=1)

    def v_strides(self, shape: BlockShape) -> Strides:
        return self.k_strides(shape)._replace(slot=1, unit=PANEL)
