"""A family of models: everything that distinguishes it from other families, in one record.

Each family has one file in this folder. The file exports `FAMILY`, and families.py lists it.
`forward` says how the model computes. `layer` says which tensors a layer has. `gguf` and `hf` say
what is special about its files. A field with a default may be left out. The settings that all GGUF
files or all Hugging Face folders share are in loading/gguf_config.py and loading/hf_config.py.
Non-goals: opening files; arithmetic (backends do it, behind graph/ops.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvarn.models.config import ModelConfig
from kvarn.models.tensors import Fused, Tensor, outer_tensors
from kvarn.models.windows import Windows, gguf_windows, hf_windows
from kvarn.settings import Settings


class Refusal(NamedTuple):
    """A setting that kvarn cannot follow. Files may leave it out or give it a neutral value."""

    key: str
    neutral: tuple[Any, ...]
    what: str  # "kvarn has no ..."


def usual_scale(config: ModelConfig) -> float | None:
    return None  # 1 / sqrt(head_dim)


@dataclass(frozen=True, slots=True)
class GGUFRules:
    """What is special about a family's GGUF files. Keys lack the family's name (`llama.`)."""

    adjacent_pairs: bool = False  # rows (2i, 2i + 1) of a head are stored for rope's (i, i + dim/2)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that files may leave out
    windows: Callable[[Settings, ModelConfig], Windows] = gguf_windows
    local_rope_base: str | None = None  # the key with the rope base of layers that have a window
    # The scale of attention scores in files without the key attention.scale.
    attention_scale: Callable[[ModelConfig], float | None] = usual_scale
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class HFRules:
    """What is special about a family's Hugging Face folders."""

    # Each model_type of config.json that belongs to the family, with the defaults of its keys:
    # published files leave out keys that have their default.
    model_types: Mapping[str, Mapping[str, Any]]
    multimodal: tuple[str, ...] = ()  # the model types whose text settings are inside text_config
    activation: tuple[str, str] = ("hidden_act", "silu")  # the key and the only value that kvarn runs
    windows: Callable[[Settings, ModelConfig], Windows] = hf_windows
    local_rope_base: str | None = None  # the key with the rope base of layers that have a window
    norm_offset: float = 0.0  # add this to the stored weights of norms
    ignored: tuple[str, ...] = ()  # parts of names of tensors that the text model does not use
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    name: str  # general.architecture of GGUF files
    forward: Callable[[Any, ModelConfig], Any]  # (ops, config) -> logits
    layer: Callable[[ModelConfig], dict[str, Tensor]]  # a layer's tensors
    hf: HFRules
    gguf: GGUFRules = GGUFRules()
    fused: tuple[Fused, ...] = ()  # tensors of a layer that files store as one

    def tensors(self, config: ModelConfig) -> dict[str, Tensor]:
        """All tensors that a model may have, by their full names."""
        layer = self.layer(config)
        return outer_tensors(config) | {
            f"blk.{i}.{name}": tensor for i in range(config.n_layers) for name, tensor in layer.items()
        }
