"""kvarn: an inference engine for language models. Its KV cache is the product.

    from kvarn import LLM, SamplingParams

Names are loaded when they are first used, so importing the package is fast.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarn.async_llm import AsyncLLM
    from kvarn.engine.params import SamplingParams
    from kvarn.errors import KvarnError
    from kvarn.llm import LLM, Completion, Output, ToolCall

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "Completion", "KvarnError", "Output", "SamplingParams", "ToolCall", "__version__"]

_HOMES = {
    "LLM": "kvarn.llm",
    "AsyncLLM": "kvarn.async_llm",
    "Completion": "kvarn.llm",
    "Output": "kvarn.llm",
    "SamplingParams": "kvarn.engine.params",
    "ToolCall": "kvarn.llm",
    "KvarnError": "kvarn.errors",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'kvarn' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
