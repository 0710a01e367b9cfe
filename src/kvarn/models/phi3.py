"""Phi-3 and Phi-4: Llama whose files fuse q, k, v and gate, up; loading splits them."""

from kvarn.models.llama import forward

__all__ = ["forward"]
