"""`ModelConfig` from the metadata of a GGUF file: the settings that all families share.

Non-goals: a family's own settings (models/); the tokenizer's keys; tensors. There is one exception:
the numbers of the tensor `rope_freqs.weight` are a setting.
"""

from dataclasses import replace

import numpy as np

from kvarn.errors import BadModel, printable
from kvarn.graph.ops import FactorScaling, LinearScaling, Rope, RopeScaling, YarnScaling
from kvarn.loading.checks import check_config, find_family
from kvarn.loading.gguf import GGUFFile
from kvarn.loading.quants import dequantize
from kvarn.models.config import ModelConfig
from kvarn.models.families import FAMILIES
from kvarn.models.family import Family, Refusal
from kvarn.models.rope import yarn_magnitude
from kvarn.settings import Settings

REFUSED = (
    Refusal("expert_count", (0,), "mixture of experts"),
    Refusal("attention.causal", (True,), "attention that sees the future"),
    Refusal("attn_logit_softcapping", (0.0,), "soft-capped scores"),
    Refusal("final_logit_softcapping", (0.0,), "soft-capped logits"),
    Refusal("logit_scale", (0.0, 1.0), "such scale"),
    Refusal("residual_scale", (0.0, 1.0), "such scale"),
    Refusal("embedding_scale", (0.0, 1.0), "such scale"),
)


def gguf_config(file: GGUFFile) -> ModelConfig:
    where = str(file.path)
    split = Settings(where, file.metadata, "split.").integer("count", 1, least=0)
    if split > 1:
        raise BadModel(f"{where} is one of {split} parts; merge them into one file with llama-gguf-split --merge")
    family = find_family(where, Settings(where, file.metadata, "general.").text("architecture"), FAMILIES)
    defaults = {f"{family.name}.{key}": value for key, value in family.gguf.defaults.items()}
    settings = Settings(where, defaults | file.metadata, f"{family.name}.")
    for refusal in (*REFUSED, *family.gguf.refused):
        settings.refuse(*refusal)
    config = _shared(file, family, settings)
    check_config(where, len(file.tensors), config)
    local_base = family.gguf.local_rope_base
    return replace(
        config,
        windows=family.gguf.windows(settings, config),
        local_rope=None if local_base is None else Rope(settings.number(local_base), config.rope.dim),
        attention_scale=settings.optional_number("attention.scale") or family.gguf.attention_scale(config),
    )


def _shared(file: GGUFFile, family: Family, settings: Settings) -> ModelConfig:
    """All but windows, local rope and attention scale, which are the family's to decide."""
    n_heads, hidden = settings.integer("attention.head_count"), settings.integer("embedding_length")
    context = settings.integer("context_length")
    head_dim = settings.integer("attention.key_length", max(1, hidden // n_heads))
    if settings.integer("attention.value_length", head_dim) != head_dim:
        raise settings.bad("attention.value_length", f"the keys' {head_dim}: kvarn has one head size for both")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise BadModel(f"{file.path} has no tensor token_embd.weight; fetch or convert the model again")
    return ModelConfig(
        architecture=family.name,
        name=printable(Settings(settings.where, file.metadata, "general.").text("name", file.path.stem), 200),
        n_layers=settings.integer("block_count"),
        n_heads=n_heads,
        n_kv_heads=settings.integer("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        hidden=hidden,
        feed_forward=settings.integer("feed_forward_length"),
        vocab_size=embedding.shape[0],
        context=context,
        norm_eps=settings.number("attention.layer_norm_rms_epsilon"),
        rope=Rope(
            base=settings.number("rope.freq_base", 10_000.0),
            dim=settings.integer("rope.dimension_count", head_dim),
            scaling=_scaling(file, settings, context),
        ),
        windows=(),
    )


def _scaling(file: GGUFFile, settings: Settings, context: int) -> RopeScaling | None:
    where = str(file.path)
    longrope = [name for name in file.tensors if name.startswith("rope_factors_")]
    factor = settings.number("rope.scaling.factor", settings.number("rope.scale_linear", 1.0))
    kind = settings.text("rope.scaling.type", "linear")  # a factor without a type is linear
    if longrope or kind == "longrope":
        raise BadModel(f"{where} needs the rope scaling longrope, which kvarn does not have; use a short-context model")
    if kind not in ("none", "linear", "yarn"):
        raise BadModel(
            f"{where} needs the rope scaling {kind}, and kvarn has: linear, yarn, factors; use another model"
        )
    scaling: RopeScaling | None = None
    if kind == "linear" and factor != 1.0:
        scaling = LinearScaling(factor)
    if kind == "yarn":
        scaling = _yarn(settings, factor, context)
    factors = file.tensors.get("rope_freqs.weight")
    if factors is None:
        return scaling
    if scaling is not None:
        raise BadModel(f"{where} scales its rope twice, by {kind} and by rope_freqs.weight; convert the model again")
    numbers = dequantize(file.raw(factors.name), factors.type, factors.shape)
    if numbers.ndim != 1 or not np.isfinite(numbers).all() or numbers.min() <= 0:
        raise BadModel(f"{where}: rope_freqs.weight is no list of positive numbers; fetch or convert the model again")
    return FactorScaling(tuple(numbers.tolist()))


def _yarn(settings: Settings, factor: float, context: int) -> YarnScaling:
    settings.refuse("rope.scaling.yarn_ext_factor", (1.0, -1.0), "partly extrapolated yarn")
    settings.refuse("rope.scaling.yarn_log_multiplier", (0.0,), "yarn with a log multiplier")
    given = settings.number("rope.scaling.attn_factor", settings.number("rope.scaling.yarn_attn_factor", 1.0))
    return YarnScaling(
        factor=factor,
        original_context=settings.integer("rope.scaling.original_context_length", context),
        beta_fast=settings.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=settings.number("rope.scaling.yarn_beta_slow", 1.0),
        # GGUF's factor multiplies the usual one, where Hugging Face's replaces it.
        attention_factor=None if given == 1.0 else given * yarn_magnitude(factor),
    )
