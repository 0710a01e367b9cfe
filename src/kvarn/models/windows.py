"""Which layers of a model have a sliding window: one entry per layer, None for a layer without one.

A family gives two functions `(settings, config) -> Windows`, one for each kind of file. This file
has the rules that families share. `config` is complete except for what a family's rules add.
Non-goals: what a window hides (cache/spec.py).
"""

from collections.abc import Callable, Sequence

from kvarn.errors import BadModel
from kvarn.models.config import ModelConfig
from kvarn.settings import Settings

Windows = tuple[int | None, ...]


def no_windows(settings: Settings, config: ModelConfig) -> Windows:
    return (None,) * config.n_layers


def same_window(window: int, config: ModelConfig) -> Windows:
    """All layers have it. A window as long as the context hides nothing and counts as none."""
    return (None if window >= config.context else window,) * config.n_layers


def all_but_every_nth(n: int, window: int, config: ModelConfig) -> Windows:
    """Layer n - 1, layer 2n - 1 and so on have no window."""
    return tuple(None if (layer + 1) % n == 0 else window for layer in range(config.n_layers))


def windows_by_layer(settings: Settings, key: str, has: Sequence[bool], window: int, config: ModelConfig) -> Windows:
    """`has` is what the setting `key` says of each layer."""
    if len(has) < config.n_layers:
        raise BadModel(
            f"{settings.where}: {settings.prefix}{key} covers {len(has)} layers and the model has "
            f"{config.n_layers}; fetch or convert the model again"
        )
    return tuple(window if has[layer] else None for layer in range(config.n_layers))


def gguf_windows(settings: Settings, config: ModelConfig) -> Windows:
    """The window of all layers. A file without one leaves the key out or says 0."""
    if settings.get("attention.sliding_window") in (None, 0):
        return no_windows(settings, config)
    return same_window(settings.integer("attention.sliding_window"), config)


def hf_windows(
    settings: Settings, config: ModelConfig, otherwise: Callable[[int, ModelConfig], Windows] = same_window
) -> Windows:
    """`layer_types` says which layers have the window. `otherwise` decides where it is missing."""
    if settings.get("sliding_window") is None:
        return no_windows(settings, config)
    window, kinds = settings.integer("sliding_window"), settings.get("layer_types")
    if kinds is None:
        return otherwise(window, config)
    if not isinstance(kinds, list) or not all(kind in ("sliding_attention", "full_attention") for kind in kinds):
        raise settings.bad("layer_types", "a list of sliding_attention and full_attention")
    return windows_by_layer(settings, "layer_types", [kind == "sliding_attention" for kind in kinds], window, config)
