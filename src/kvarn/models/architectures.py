"""Architectures: one file each, written once over `ops`. To add one, write its file and add its line here."""

from collections.abc import Callable, Mapping
from typing import Any

from kvarn.errors import KvarnError
from kvarn.graph.record import Graph, record
from kvarn.models import gemma3, llama, phi3, qwen2, qwen3
from kvarn.models.config import ModelConfig

ARCHITECTURES: dict[str, Callable[[Any, ModelConfig], Any]] = {
    "llama": llama.forward,
    "qwen2": qwen2.forward,
    "qwen3": qwen3.forward,
    "gemma3": gemma3.forward,
    "phi3": phi3.forward,
}


def forward_of(architecture: str) -> Callable[[Any, ModelConfig], Any]:
    try:
        return ARCHITECTURES[architecture]
    except KeyError:
        raise KvarnError(
            f"the architecture {architecture!r} is not implemented; there are: {', '.join(ARCHITECTURES)}"
        ) from None


def graph_of(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Graph:
    """The model's calls, for a file whose tensors have these shapes."""
    return record(forward_of(config.architecture), config, shapes)
