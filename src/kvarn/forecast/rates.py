"""The figures of a machine that speed depends on. All were measured, none was fitted to a model.

A figure has a name, such as `read Q4_K`. `seconds per ...` is the unit of all of them, because times add up
and rates do not. Non-goals: measuring (machine.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvarn.cache.plan import Plan
from kvarn.cache.spec import LayerSpec


def read(kind: str) -> str:
    """Of a byte of weights, in a product of one row."""
    return f"read {kind}"


def multiply(kind: str) -> str:
    """Of a multiplication, in a product of many rows."""
    return f"multiply {kind}"


def shape_of(plan: Plan, spec: LayerSpec) -> str:
    return f"{plan.codec.name} {plan.layout.name} {spec.n_heads}/{spec.n_kv_heads}x{spec.k_dim}"


def read_cells(shape: str) -> str:
    """Of a byte of cells, in a decode step."""
    return f"read cells {shape}"


def small_attention(shape: str) -> str:
    """Of a layer's attention in a decode step, beside the cells that it reads."""
    return f"small attention {shape}"


def attend(shape: str) -> str:
    """Of a multiplication, in the attention of a prompt."""
    return f"attend {shape}"


MEMORY = "read memory"  # of a byte: no step can read faster
SMALL = "small product"  # a product of one row and the norm before it, beside its bytes
STEP = "step"  # a step of the engine that computes nothing, without the logits
LOGIT = "logit"  # the greedy choice among logits, for each


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds, by figure."""

    seconds: Mapping[str, float]

    def __getitem__(self, figure: str) -> float:
        return self.seconds[figure]

    @property
    def gb_s(self) -> float:
        """Of reading memory."""
        return 1 / self[MEMORY] / 1e9
