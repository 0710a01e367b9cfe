"""Everything that decides the bits of a cell, beside the tokens.

Two cells of the same tokens are equal bit for bit if their fingerprints are equal. So cells may be kept outside of the
process and used by another one, on another machine too.

    model       SHA-256 of the weights (weights.py)
    config      the sizes and constants that the model computes with: rope and its scaling, norms, scale
    windows     what a query may see, by layer, with the user's window and pinned tokens
    k, v        codec of keys and of values
    backend     cpu, cuda, reference
    device      what else decides on a device: compute capability and kernels of a GPU
    order       order of sums, where a backend has more than one
    arithmetic  version of the arithmetic, raised by each release that changes bits

Not in it, because they change no bit: strategy, layout, block size, context, threads, instruction set, batch sizes.
Non-goals: tokenizer and chat template, which decide tokens; sampling.
"""

from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from hashlib import blake2b

from kvarn import arithmetic
from kvarn.backends.base import Backend
from kvarn.cache.plan import Plan
from kvarn.cache.spec import LayerSpec
from kvarn.models.config import ModelConfig

_WORDS = {
    "model": "other weights",
    "config": "another configuration of the model",
    "windows": "other windows",
    "k": "cache type",
    "v": "cache type of values",
    "backend": "backend",
    "device": "device",
    "order": "order of sums",
    "arithmetic": "version of the arithmetic",
}
_OPAQUE = ("model", "config")  # digests: their values say nothing to a reader


@dataclass(frozen=True)
class Fingerprint:
    model: str
    config: str
    windows: str
    k: str
    v: str
    backend: str
    device: str
    order: str
    arithmetic: str

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits, also usable as the name of a folder."""
        return blake2b(repr(astuple(self)).encode(), digest_size=16).hexdigest()

    def difference(self, here: "Fingerprint") -> str:
        """Why cells with this fingerprint cannot be used `here`, as the end of a sentence; empty if they can."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(here, field.name)
            if ours != theirs:
                return _because(field.name, ours, theirs)
        return ""

    def until(self, n_tokens: int, layers: "tuple[LayerSpec, ...]") -> "Fingerprint":
        """The fingerprint of the first tokens of a sequence: a window that holds all of them hides nothing."""
        return replace(self, windows=windows_of([_seen(spec, n_tokens) for spec in layers]))


def fingerprint_of(weights: str, config: ModelConfig, plan: Plan, backend: Backend) -> Fingerprint:
    """`weights` is Weights.digest()."""
    facts = backend.facts()
    device = [f"compute {facts['compute']}", facts.get("revision", "")] if "compute" in facts else []
    return Fingerprint(
        model=weights,
        config=_config(config),
        windows=windows_of(layers_of(plan)),
        k=plan.codec.k.name,
        v=plan.codec.v.name,
        backend=facts["name"],
        device=" ".join([*filter(None, device), *(["inexact"] if facts.get("exact") == "no" else [])]),
        order=facts.get("order", ""),
        arithmetic=str(arithmetic.VERSION),
    )


def layers_of(plan: Plan) -> tuple[LayerSpec, ...]:
    """What each layer's queries may see, with the user's window and pinned tokens."""
    specs = {layer: group.config.spec for group in plan.groups for layer in group.layers}
    return tuple(specs[layer] for layer in range(plan.n_layers))


def windows_of(layers: "tuple[LayerSpec, ...] | list[LayerSpec]") -> str:
    """Runs of equal layers: `30 all`, `5 512, 1 all`, `24 1024+4` (1,024 tokens and the first 4)."""
    runs: list[tuple[str, int]] = []
    for spec in layers:
        seen = "all" if spec.window is None else f"{spec.window}" + (f"+{spec.pinned}" if spec.pinned else "")
        n = runs.pop()[1] if runs and runs[-1][0] == seen else 0
        runs.append((seen, n + 1))
    return ", ".join(f"{n} {seen}" for seen, n in runs)


def _seen(spec: LayerSpec, n_tokens: int) -> LayerSpec:
    whole = spec.window is None or spec.window >= n_tokens
    return replace(spec, window=None, pinned=0) if whole else spec


def _config(config: ModelConfig) -> str:
    """Of everything that changes numbers. The name and the longest context do not."""
    neutral = replace(config, name="", context=0)
    return blake2b(repr(neutral).encode(), digest_size=16).hexdigest()


def _because(field: str, ours: str, here: str) -> str:
    word = _WORDS[field]
    if field in _OPAQUE:
        return f"made with {word}"
    if field == "order":
        return f"made with the order of sums {ours or 'none'}, and here it is {here or 'none'} (KVARN_SUM_ORDER={ours})"
    if field == "windows":
        return f"made with other windows: {ours} there, {here} here"
    return f"made with the {word} {ours or 'none'}, and here it is {here or 'none'}"
