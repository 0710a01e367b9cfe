"""`ModelConfig` from the config.json of a Hugging Face folder.

A key that config.json leaves out has the default that its model type documents: the files rely on it. Rope settings
come in two spellings, `rope_theta` with `rope_scaling` and the newer `rope_parameters`; Gemma's local base likewise.
Non-goals: tensors, the tokenizer, anything but the text part of a multimodal model.
"""

from pathlib import Path
from typing import Any

from kvarn.errors import BadModel
from kvarn.graph.ops import LinearScaling, Llama3Scaling, Rope, RopeScaling, YarnScaling
from kvarn.loading.checks import checked, known, known_windows
from kvarn.loading.settings import Fields
from kvarn.models.config import ModelConfig

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
    "phi3": "phi3",
}

_LLAMA: dict[str, Any] = dict(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    hidden_act="silu",
)
_QWEN = _LLAMA | dict(
    vocab_size=151936,
    intermediate_size=22016,
    num_key_value_heads=32,
    max_position_embeddings=32768,
    use_sliding_window=False,
    sliding_window=4096,
    max_window_layers=28,
)
_GEMMA3 = dict(
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
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA
    | dict(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096),
    "qwen2": _QWEN,
    "qwen3": _QWEN | dict(head_dim=128),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "phi3": _LLAMA
    | dict(vocab_size=32064, hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096, rms_norm_eps=1e-5),
}
# What each type calls its activation: another function than the usual one is refused.
_ACTIVATION = {"gemma3": ("hidden_activation", "gelu_pytorch_tanh")}


def settings(folder: Path, config: dict[str, Any]) -> Fields:
    """What config.json says of the text model, on top of its type's defaults."""
    where = str(folder / "config.json")
    kind = Fields(where, config).text("model_type")
    known(where, kind, ARCHITECTURES)
    text = Fields(where, config).inside("text_config").values if kind == "gemma3" else {}
    return Fields(where, {**DEFAULTS[kind], **config, **text, "model_type": kind})


def hf_config(folder: Path, config: dict[str, Any], n_tensors: int) -> ModelConfig:
    fields = settings(folder, config)
    architecture = ARCHITECTURES[fields.text("model_type")]
    fields.refuse("quantization_config", (), "weights in this quantization (GGUF's are read)")
    fields.refuse("attn_logit_softcapping", (), "soft-capped scores")
    fields.refuse("final_logit_softcapping", (), "soft-capped logits")
    fields.refuse("use_bidirectional_attention", (False,), "attention that sees the future")
    fields.refuse("mlp_bias", (False,), "bias in the feed-forward layers")
    key, activation = _ACTIVATION.get(architecture, ("hidden_act", "silu"))
    fields.refuse(key, (activation,), "such activation here")

    n_layers, n_heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
    hidden, context = fields.integer("hidden_size"), fields.integer("max_position_embeddings")
    head_dim = fields.integer("head_dim", max(1, hidden // n_heads))
    rope, local_rope = _ropes(fields, architecture, head_dim, context)
    scalar = fields.number("query_pre_attn_scalar", float(head_dim))
    return checked(
        fields.where,
        n_tensors,
        ModelConfig(
            architecture=architecture,
            name=folder.resolve().name,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=fields.integer("num_key_value_heads", n_heads),
            head_dim=head_dim,
            hidden=hidden,
            feed_forward=fields.integer("intermediate_size"),
            vocab_size=fields.integer("vocab_size"),
            context=context,
            norm_eps=fields.number("rms_norm_eps"),
            rope=rope,
            windows=known_windows(fields.where, n_tensors, n_layers, context, _window(fields, architecture)),
            local_rope=local_rope,
            attention_scale=None if scalar == head_dim else scalar**-0.5,
        ),
    )


def _window(fields: Fields, architecture: str) -> tuple[int | None, int | list[bool] | None]:
    """The window, and which layers have it: every n-th has none, or one truth value a layer, or None for all."""
    qwen = architecture in ("qwen2", "qwen3")
    if fields.get("sliding_window") is None or (qwen and not fields.flag("use_sliding_window", False)):
        return None, None
    window, kinds = fields.integer("sliding_window"), fields.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or not all(k in ("sliding_attention", "full_attention") for k in kinds):
            raise fields.bad("layer_types", "a list of sliding_attention and full_attention")
        return window, [kind == "sliding_attention" for kind in kinds]
    if architecture == "gemma3":
        older = fields.integer("sliding_window_pattern")
        return window, fields.integer("_sliding_window_pattern", older)
    if qwen:
        n_layers, first = fields.integer("num_hidden_layers"), fields.integer("max_window_layers", least=0)
        return window, [False] * min(first, n_layers) + [True] * max(0, n_layers - first)
    return window, None


def _ropes(fields: Fields, architecture: str, head_dim: int, context: int) -> tuple[Rope, Rope | None]:
    """The rope, and the one of the layers with a window where it differs."""
    new = fields.inside("rope_parameters")
    by_layer = new.get("full_attention") is not None or new.get("sliding_attention") is not None
    given = new.inside("full_attention") if by_layer else new
    old = fields.inside("rope_scaling")
    part = given.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    dim = int(head_dim * part)
    scaling = _scaling(given if given.get("rope_type") or given.get("type") else old, context)
    rope = Rope((fields if given.get("rope_theta") is None else given).number("rope_theta"), dim, scaling)
    if architecture != "gemma3":
        return rope, None
    local = new.inside("sliding_attention")
    base = local.number("rope_theta", fields.number("rope_local_base_freq"))
    return rope, Rope(base, dim, _scaling(local, context))


def _scaling(fields: Fields, context: int) -> RopeScaling | None:
    kind = fields.text("rope_type", fields.text("type", "default"))
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(fields.number("factor"))
        case "llama3":
            return Llama3Scaling(
                fields.number("factor"),
                fields.number("low_freq_factor"),
                fields.number("high_freq_factor"),
                fields.integer("original_max_position_embeddings"),
            )
        case "yarn":
            fields.refuse("mscale", (), "yarn with mscale")
            fields.refuse("mscale_all_dim", (), "yarn with mscale_all_dim")
            fields.refuse("truncate", (True,), "yarn without truncation")
            return YarnScaling(
                fields.number("factor"),
                fields.integer("original_max_position_embeddings", context),
                fields.number("beta_fast", 32.0),
                fields.number("beta_slow", 1.0),
                None if fields.get("attention_factor") is None else fields.number("attention_factor"),
            )
    have = "default, linear, llama3, yarn"
    raise BadModel(f"{fields.where} asks for the rope scaling {kind}, and kvarn has: {have}; use another model")
