"""Gemma 3.

- Local layers have a window and a rope base of their own. Global layers see everything.
- There is a norm before and after attention, and before and after the feed-forward part.
- Queries and keys are normalized per head.
- Embeddings are scaled by sqrt(hidden).
- The activation is gelu.
"""

from typing import Any

from kvarn.graph.ops import Ops, V
from kvarn.models import qwen3
from kvarn.models.config import ModelConfig
from kvarn.models.family import Family, GGUFRules, HFRules
from kvarn.models.llama import output
from kvarn.models.tensors import Tensor, norm
from kvarn.models.windows import Windows, all_but_every_nth, hf_windows, no_windows, same_window, windows_by_layer
from kvarn.settings import Settings


def forward(ops: Ops[V], config: ModelConfig) -> V:
    x = ops.embed("token_embd.weight", config.hidden**0.5)
    for layer in range(config.n_layers):
        block = f"blk.{layer}."
        h = qwen3.attention(ops, config, layer, ops.rms_norm(x, block + "attn_norm.weight"))
        x = ops.add(x, ops.rms_norm(h, block + "post_attention_norm.weight"))
        h = feed_forward(ops, layer, ops.rms_norm(x, block + "ffn_norm.weight"))
        x = ops.add(x, ops.rms_norm(h, block + "post_ffw_norm.weight"))
    return output(ops, x)


def feed_forward(ops: Ops[V], layer: int, h: V) -> V:
    block = f"blk.{layer}.ffn_"
    gate, up = ops.linear(h, block + "gate.weight"), ops.linear(h, block + "up.weight")
    return ops.linear(ops.gated(gate, up, "gelu"), block + "down.weight")


def layer(c: ModelConfig) -> dict[str, Tensor]:
    return qwen3.layer(c) | {
        "ffn_norm.weight": norm(c.hidden, "pre_feedforward_layernorm"),
        "post_attention_norm.weight": norm(c.hidden, "post_attention_layernorm"),
        "post_ffw_norm.weight": norm(c.hidden, "post_feedforward_layernorm"),
    }


_PATTERN = "attention.sliding_window_pattern"


def windows_in_gguf(settings: Settings, config: ModelConfig) -> Windows:
    """The pattern is a number n (every n-th layer is global) or one truth value per layer."""
    # Windows also choose the rope, so this key may not be missing.
    window, pattern = settings.integer("attention.sliding_window"), settings.get(_PATTERN)
    if isinstance(pattern, bool):  # the same for every layer
        return same_window(window, config) if pattern else no_windows(settings, config)
    if isinstance(pattern, list) and all(isinstance(local, bool) for local in pattern):
        return windows_by_layer(settings, _PATTERN, pattern, window, config)
    return all_but_every_nth(settings.integer(_PATTERN), window, config)


def windows_in_hf(settings: Settings, config: ModelConfig) -> Windows:
    def by_pattern(window: int, config: ModelConfig) -> Windows:
        n = settings.integer("_sliding_window_pattern", settings.integer("sliding_window_pattern"))
        return all_but_every_nth(n, window, config)

    return hf_windows(settings, config, by_pattern)


def scale_in_gguf(config: ModelConfig) -> float | None:
    """The 27B model scales by hidden / heads. It is the only one with 62 layers."""
    return (config.hidden / config.n_heads) ** -0.5 if config.n_layers == 62 else None


HF_DEFAULTS: dict[str, Any] = dict(
    vocab_size=262208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    max_position_embeddings=131072,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    rope_local_base_freq=10_000.0,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    sliding_window_pattern=6,
    tie_word_embeddings=True,
)

FAMILY = Family(
    name="gemma3",
    forward=forward,
    layer=layer,
    gguf=GGUFRules(
        defaults={"rope.freq_base_swa": 10_000.0, _PATTERN: 6},  # files from before 2025-08 lack them
        windows=windows_in_gguf,
        local_rope_base="rope.freq_base_swa",
        attention_scale=scale_in_gguf,
    ),
    hf=HFRules(
        model_types={"gemma3_text": HF_DEFAULTS, "gemma3": HF_DEFAULTS},
        multimodal=("gemma3",),
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        windows=windows_in_hf,
        local_rope_base="rope_local_base_freq",
        norm_offset=1.0,
        ignored=("vision_tower.", "multi_modal_projector."),
    ),
)
