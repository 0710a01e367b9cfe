"""The settings of a user, as the configuration of a model's cache. Non-goal: sizes in bytes (kvarn.cache.plan)."""

from dataclasses import replace

from kvarn.cache.plan import CacheConfig
from kvarn.cache.strategy import resolve
from kvarn.errors import KvarnError
from kvarn.models.config import ModelConfig

DEFAULT_CONTEXT = 4096  # or the context of the model, if that is less


def context_of(config: ModelConfig, context: int | None) -> int:
    """The context to use. None: the default; 0: the longest that the model was trained for."""
    return min(config.context, DEFAULT_CONTEXT) if context is None else context or config.context


def cache_config(
    model: ModelConfig,
    name: str,
    *,
    cache: str = "auto",
    cache_type: str = "bf16",
    cache_layout: str | None = None,
    cache_bytes: int | None = None,
    block_size: int | None = None,
    window: int | None = None,
    pinned: int | None = None,
    context: int | None = None,
    max_seqs: int = 8,
    max_batch_tokens: int = 512,
) -> CacheConfig:
    """The cache for a model, from the settings of `LLM`. `name` is for messages."""
    config = CacheConfig(
        layers=model.layer_specs,
        context=context_of(model, context),
        strategy=cache,
        codec=cache_type,
        layout=cache_layout,
        block_size=block_size,
        max_seqs=max_seqs,
        max_chunk=max_batch_tokens,
        window=window,
        pinned=pinned,
        cache_bytes=cache_bytes,
    )
    return fitted(config, model, name)


def fitted(config: CacheConfig, model: ModelConfig, name: str) -> CacheConfig:
    """The cache for this model. With the strategies that roll, the context is the window, and a sequence goes on to
    the context that the model was trained for."""
    if config.context > model.context:
        raise KvarnError(
            f"context {config.context:,}: {name} was trained for {model.context:,} tokens; give at most that, "
            "or 0 for all of it"
        )
    if resolve(config.strategy, config.context, config.max_seqs).rolls:
        return replace(config, context=model.context, window=config.window or config.context)
    return config
