"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, which `project` finds in the file."""

from kvarn.models.llama import forward

__all__ = ["forward"]
