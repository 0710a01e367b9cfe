"""`ModelConfig` from the config.json of a Hugging Face folder: settings that all families share.

If config.json leaves out a key, the key has the documented default of its model type. Published files
rely on this. Rope settings come in two forms: `rope_theta` with `rope_scaling`, and the newer
`rope_parameters`, which may differ between layers with and without a window.
Non-goals: a family's own settings (models/); tensors; the tokenizer; the other parts of a multimodal
model.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvarn.errors import BadModel, printable
from kvarn.graph.ops import LinearScaling, Llama3Scaling, Rope, RopeScaling, YarnScaling
from kvarn.loading.checks import check_config, find_family
from kvarn.models.config import ModelConfig
from kvarn.models.families import FAMILIES
from kvarn.models.family import Family, Refusal
from kvarn.settings import Settings

REFUSED = (
    Refusal("quantization_config", (), "weights in this quantization (GGUF's are read)"),
    Refusal("attn_logit_softcapping", (), "soft-capped scores"),
    Refusal("final_logit_softcapping", (), "soft-capped logits"),
    Refusal("use_bidirectional_attention", (False,), "attention that sees the future"),
    Refusal("mlp_bias", (False,), "bias in the feed-forward layers"),
)


def hf_family(folder: Path, config: dict[str, Any]) -> tuple[Family, Settings]:
    """The family, and what config.json says of the text model on top of its type's defaults."""
    where = str(folder / "config.json")
    given = Settings(where, config)
    model_type = given.text("model_type")
    by_type = {name: family for family in FAMILIES.values() for name in family.hf.model_types}
    family = find_family(where, model_type, by_type)
    text = given.inside("text_config").values if model_type in family.hf.multimodal else {}
    return family, Settings(where, {**family.hf.model_types[model_type], **config, **text})


def hf_config(folder: Path, config: dict[str, Any], n_tensors: int) -> ModelConfig:
    family, settings = hf_family(folder, config)
    key, activation = family.hf.activation
    for refusal in (*REFUSED, Refusal(key, (activation,), "such activation here"), *family.hf.refused):
        settings.refuse(*refusal)
    shared = _shared(folder, family, settings)
    check_config(settings.where, n_tensors, shared)
    return replace(
        shared,
        windows=family.hf.windows(settings, shared),
        local_rope=_local_rope(settings, family, shared),
        attention_scale=_attention_scale(settings, shared.head_dim),
    )


def _shared(folder: Path, family: Family, settings: Settings) -> ModelConfig:
    """All but windows, local rope and attention scale."""
    n_heads, hidden = settings.integer("num_attention_heads"), settings.integer("hidden_size")
    context = settings.integer("max_position_embeddings")
    head_dim = settings.integer("head_dim", max(1, hidden // n_heads))
    return ModelConfig(
        architecture=family.name,
        name=printable(folder.resolve().name, 200),
        n_layers=settings.integer("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=settings.integer("num_key_value_heads", n_heads),
        head_dim=head_dim,
        hidden=hidden,
        feed_forward=settings.integer("intermediate_size"),
        vocab_size=settings.integer("vocab_size"),
        context=context,
        norm_eps=settings.number("rms_norm_eps"),
        rope=_rope(settings, head_dim, context),
        windows=(),
    )


def _attention_scale(settings: Settings, head_dim: int) -> float | None:
    scalar = settings.number("query_pre_attn_scalar", float(head_dim))
    return None if scalar == head_dim else scalar**-0.5


def _rope(settings: Settings, head_dim: int, context: int) -> Rope:
    """The rope of layers without a window, or of all layers."""
    new = settings.inside("rope_parameters")
    by_layer = new.get("full_attention") is not None or new.get("sliding_attention") is not None
    given = new.inside("full_attention") if by_layer else new
    old = settings.inside("rope_scaling")
    part = given.number("partial_rotary_factor", settings.number("partial_rotary_factor", 1.0))
    scaling = _scaling(given if given.get("rope_type") or given.get("type") else old, context)
    base = (settings if given.get("rope_theta") is None else given).number("rope_theta")
    return Rope(base, int(head_dim * part), scaling)


def _local_rope(settings: Settings, family: Family, config: ModelConfig) -> Rope | None:
    """The rope of layers with a window, where the family has one."""
    if family.hf.local_rope_base is None:
        return None
    local = settings.inside("rope_parameters").inside("sliding_attention")
    base = local.number("rope_theta", settings.number(family.hf.local_rope_base))
    return Rope(base, config.rope.dim, _scaling(local, config.context))


def _scaling(settings: Settings, context: int) -> RopeScaling | None:
    kind = settings.text("rope_type", settings.text("type", "default"))
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(settings.number("factor"))
        case "llama3":
            return Llama3Scaling(
                settings.number("factor"),
                settings.number("low_freq_factor"),
                settings.number("high_freq_factor"),
                settings.integer("original_max_position_embeddings"),
            )
        case "yarn":
            settings.refuse("mscale", (), "yarn with mscale")
            settings.refuse("mscale_all_dim", (), "yarn with mscale_all_dim")
            settings.refuse("truncate", (True,), "yarn without truncation")
            return YarnScaling(
                settings.number("factor"),
                settings.integer("original_max_position_embeddings", context),
                settings.number("beta_fast", 32.0),
                settings.number("beta_slow", 1.0),
                settings.optional_number("attention_factor"),
            )
    have = "default, linear, llama3, yarn"
    raise BadModel(f"{settings.where} asks for the rope scaling {kind}, and kvarn has: {have}; use another model")
