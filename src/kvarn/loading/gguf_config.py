"""`ModelConfig` from the metadata of a GGUF file.

Non-goals: tensors, but for `rope_freqs.weight`, whose numbers are a setting; the tokenizer's keys.
"""

import numpy as np

from kvarn.errors import BadModel
from kvarn.graph.ops import FactorScaling, LinearScaling, Rope, RopeScaling, YarnScaling
from kvarn.loading.checks import checked, known, known_windows
from kvarn.loading.gguf import GGUFFile
from kvarn.loading.quants import dequantize
from kvarn.loading.settings import Fields
from kvarn.models.config import ModelConfig
from kvarn.models.rope import yarn_magnitude

# llama covers Mistral too.
ARCHITECTURES = {name: name for name in ("llama", "qwen2", "qwen3", "gemma3", "phi3")}
_GEMMA3_LOCAL_BASE = 10_000.0  # files converted before 2025-08 do not say it, nor the pattern
_GEMMA3_PATTERN = 6
_GEMMA3_27B_LAYERS = 62


def gguf_config(file: GGUFFile) -> ModelConfig:
    where = str(file.path)
    general = Fields(where, file.metadata, "general.")
    split = Fields(where, file.metadata, "split.").integer("count", 1, least=0)
    if split > 1:
        raise BadModel(f"{where} is one of {split} parts; merge them into one file with llama-gguf-split --merge")
    architecture = known(where, general.text("architecture"), ARCHITECTURES)
    fields = Fields(where, file.metadata, f"{architecture}.")
    fields.refuse("expert_count", (0,), "mixture of experts")
    fields.refuse("attention.causal", (True,), "attention that sees the future")
    fields.refuse("attn_logit_softcapping", (0.0,), "soft-capped scores")
    fields.refuse("final_logit_softcapping", (0.0,), "soft-capped logits")
    for key in ("logit_scale", "residual_scale", "embedding_scale"):
        fields.refuse(key, (0.0, 1.0), "such scale")

    n_layers, n_heads = fields.integer("block_count"), fields.integer("attention.head_count")
    hidden, context = fields.integer("embedding_length"), fields.integer("context_length")
    head_dim = fields.integer("attention.key_length", max(1, hidden // n_heads))
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.bad("attention.value_length", f"the keys' {head_dim}: kvarn has one head size for both")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise BadModel(f"{where} has no tensor token_embd.weight; fetch or convert the model again")
    rope = Rope(
        base=fields.number("rope.freq_base", 10_000.0),
        dim=fields.integer("rope.dimension_count", head_dim),
        scaling=_scaling(file, fields, context),
    )
    gemma = architecture == "gemma3"
    return checked(
        where,
        len(file.tensors),
        ModelConfig(
            architecture=architecture,
            name=general.text("name", file.path.stem),
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=fields.integer("attention.head_count_kv", n_heads),
            head_dim=head_dim,
            hidden=hidden,
            feed_forward=fields.integer("feed_forward_length"),
            vocab_size=embedding.shape[0],
            context=context,
            norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope=rope,
            windows=known_windows(where, len(file.tensors), n_layers, context, _window(fields, architecture)),
            local_rope=Rope(fields.number("rope.freq_base_swa", _GEMMA3_LOCAL_BASE), rope.dim) if gemma else None,
            attention_scale=_scale(fields, architecture, n_layers, hidden / n_heads),
        ),
    )


def _scale(fields: Fields, architecture: str, n_layers: int, width: float) -> float | None:
    if fields.get("attention.scale") is not None:
        return fields.number("attention.scale")
    # Of the Gemma 3 models the largest alone scales by hidden / heads (168) instead of by the head size.
    return width**-0.5 if architecture == "gemma3" and n_layers == _GEMMA3_27B_LAYERS else None


def _window(fields: Fields, architecture: str) -> tuple[int | None, int | list[bool] | None]:
    """The window, and which layers have it: every n-th has none, or one truth value a layer, or None for all."""
    if architecture == "gemma3":  # its windows also choose the rope, so that they may not be missing
        window, pattern = fields.integer("attention.sliding_window"), fields.get("attention.sliding_window_pattern")
        if isinstance(pattern, bool):  # the same for every layer
            return (window, None) if pattern else (None, None)
        if isinstance(pattern, list) and all(isinstance(local, bool) for local in pattern):
            return window, pattern
        return window, fields.integer("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    if architecture in ("qwen2", "qwen3") or fields.get("attention.sliding_window") in (None, 0):
        # Qwen's published models carry a window and do not use it; GGUF has no key that would say so.
        return None, None
    return fields.integer("attention.sliding_window"), None


def _scaling(file: GGUFFile, fields: Fields, context: int) -> RopeScaling | None:
    where = str(file.path)
    longrope = [name for name in file.tensors if name.startswith("rope_factors_")]
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    kind = fields.text("rope.scaling.type", "linear")  # what readers take a factor without a type for
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
        scaling = _yarn(fields, factor, context)
    factors = file.tensors.get("rope_freqs.weight")
    if factors is None:
        return scaling
    if scaling is not None:
        raise BadModel(f"{where} scales its rope twice, by {kind} and by rope_freqs.weight; convert the model again")
    numbers = dequantize(file.raw(factors.name), factors.type, factors.shape)
    if numbers.ndim != 1 or not np.isfinite(numbers).all() or numbers.min() <= 0:
        raise BadModel(f"{where}: rope_freqs.weight is no list of positive numbers; fetch or convert the model again")
    return FactorScaling(tuple(numbers.tolist()))


def _yarn(fields: Fields, factor: float, context: int) -> YarnScaling:
    fields.refuse("rope.scaling.yarn_ext_factor", (1.0, -1.0), "partly extrapolated yarn")
    fields.refuse("rope.scaling.yarn_log_multiplier", (0.0,), "yarn with a log multiplier")
    given = fields.number("rope.scaling.attn_factor", fields.number("rope.scaling.yarn_attn_factor", 1.0))
    return YarnScaling(
        factor=factor,
        original_context=fields.integer("rope.scaling.original_context_length", context),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        # GGUF's factor multiplies the usual one, where Hugging Face's replaces it.
        attention_factor=None if given == 1.0 else given * yarn_magnitude(factor),
    )
