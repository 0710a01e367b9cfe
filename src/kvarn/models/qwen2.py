"""Qwen2 and Qwen2.5: like Llama, with biases on q, k and v. Sliding windows are off by default."""

from kvarn.models import llama
from kvarn.models.config import ModelConfig
from kvarn.models.family import Family, GGUFRules, HFRules
from kvarn.models.tensors import Tensor, require
from kvarn.models.windows import Windows, hf_windows, no_windows
from kvarn.settings import Settings


def layer(c: ModelConfig) -> dict[str, Tensor]:
    return require(llama.layer(c), "attn_q.bias", "attn_k.bias", "attn_v.bias")


def windows(settings: Settings, config: ModelConfig) -> Windows:
    """The first `max_window_layers` layers have no window."""
    if not settings.flag("use_sliding_window", False):
        return no_windows(settings, config)

    def later_layers(window: int, config: ModelConfig) -> Windows:
        first = settings.integer("max_window_layers", least=0)
        return tuple(window if layer >= first else None for layer in range(config.n_layers))

    return hf_windows(settings, config, later_layers)


# The published models state a window and do not use it. GGUF has no key for "not used".
GGUF = GGUFRules(windows=no_windows)
HF_DEFAULTS = llama.HF_DEFAULTS | dict(
    vocab_size=151936,
    intermediate_size=22016,
    num_key_value_heads=32,
    max_position_embeddings=32768,
    use_sliding_window=False,
    sliding_window=4096,
    max_window_layers=28,
)

FAMILY = Family(
    name="qwen2",
    forward=llama.forward,
    layer=layer,
    gguf=GGUF,
    hf=HFRules(model_types={"qwen2": HF_DEFAULTS}, windows=windows),
)
