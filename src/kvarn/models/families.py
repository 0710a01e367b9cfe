"""The table of families. To add one, write its file and add its line here.

Non-goals: what a family is (family.py).
"""

from collections.abc import Mapping

from kvarn.errors import KvarnError
from kvarn.graph.record import Graph, record
from kvarn.models import gemma3, llama, phi3, qwen2, qwen3
from kvarn.models.config import ModelConfig
from kvarn.models.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        llama.FAMILY,
        qwen2.FAMILY,
        qwen3.FAMILY,
        gemma3.FAMILY,
        phi3.FAMILY,
    )
}


def family_of(config: ModelConfig) -> Family:
    try:
        return FAMILIES[config.architecture]
    except KeyError:
        name, known = config.architecture, ", ".join(FAMILIES)
        raise KvarnError(f"the architecture {name!r} is not implemented; use one of: {known}") from None


def graph_of(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Graph:
    """The model's operations, for a file whose tensors have these shapes."""
    return record(family_of(config).forward, config, shapes)
