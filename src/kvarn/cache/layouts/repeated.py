"""Repeated: head-major, with each KV head stored once per query head.

A baseline for measurements: a cache without native GQA. Memory and reads grow by the factor
`LayerSpec.group`. A step repeats only its own tokens, never the earlier ones.
"""

from kvarn.cache.layouts.head_major import HeadMajor
from kvarn.cache.spec import LayerSpec


class Repeated(HeadMajor):
    name = "repeated"

    def refusal(self, spec: LayerSpec, block_size: int) -> str | None:
        if spec.group == 1:
            return "every query head has a KV head of its own, so there is nothing to repeat: use head-major"
        return None

    def stored_heads(self, spec: LayerSpec) -> int:
        return spec.n_heads
