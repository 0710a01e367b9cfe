"""Token-major: [slot][head][dim], the canonical layout. One token is one contiguous write."""

from kvarn.cache.layout import BlockShape, Strides
from kvarn.cache.spec import LayerSpec


class TokenMajor:
    name = "token-major"

    def refusal(self, spec: LayerSpec, block_size: int) -> str | None:
        return None

    def stored_heads(self, spec: LayerSpec) -> int:
        return spec.n_kv_heads

    def panel_size(self, block_size: int) -> int:
        return block_size

    def k_strides(self, shape: BlockShape) -> Strides:
        return Strides(block=shape.total, panel=shape.total, head=shape.units, slot=shape.heads * shape.units, unit=1)

    v_strides = k_strides
