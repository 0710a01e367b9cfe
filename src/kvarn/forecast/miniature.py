"""The speed of a model on a device, from a few of its layers: their shapes and types, and made-up numbers.

A device is fast at some shapes and slow at others, so no figure of the device alone tells the speed of a model. But a
layer takes as long as another one of its kind. The real engine runs over miniatures of the model: one with some layers
of each kind, and for each kind one with more of them. The differences are what layers take, and the rest is
everything beside them: embedding, logits, sampling, the step itself. A miniature must be so large that the device
works longer than the host, which prepares the next step meanwhile. A model of a few GB is built whole.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple, cast

import numpy as np

from kvarn.arrays import Bytes, Floats
from kvarn.backends.base import Backend
from kvarn.bench.ids import RandomIds
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.engine.config import EngineConfig
from kvarn.engine.engine import Engine
from kvarn.forecast.truth import TOKENS, Measured, measured_at, warm_up
from kvarn.loading.checkpoint import Checkpoint
from kvarn.loading.encodings import TensorInfo
from kvarn.loading.progress import Progress
from kvarn.models.config import ModelConfig
from kvarn.models.families import graph_of

MUCH = 2 << 30  # bytes of layers that the least miniature has: much more than a device keeps in its cache
FEWEST = 2  # layers of a kind
GROWTH = 0.3  # of a step, that as many layers again must add: otherwise the host is what takes time
FILLER = 0x10  # of all bytes of matrices: a small finite number in every type

Kind = tuple[int | None, tuple[tuple[str, str, tuple[int, ...]], ...]]  # window; names, types and shapes of tensors


class Seconds(NamedTuple):
    """Of one sequence at a depth."""

    step: float
    first: float  # token of a prompt that long

    def plus(self, other: "Seconds", times: float = 1) -> "Seconds":
        return Seconds(self.step + times * other.step, self.first + times * other.first)


@dataclass(frozen=True, slots=True)
class Miniature:
    """Some layers of a model, in place of a Checkpoint."""

    config: ModelConfig
    infos: list[TensorInfo]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {info.name: info.shape for info in self.infos}

    def tensor(self, name: str) -> Floats:
        return np.ones(self.shapes[name], np.float32)

    def read_rows(self, name: str, start: int, out: Bytes) -> None:
        out[...] = FILLER


def miniature(config: ModelConfig, infos: Sequence[TensorInfo], layers: Sequence[int]) -> Miniature:
    """With these layers of the model, which may be named more than once."""
    found = [info for info in infos if layer_of(info.name) is None]
    for at, layer in enumerate(layers):
        begin = f"blk.{layer}."
        of_layer = [info for info in infos if info.name.startswith(begin)]
        found += [replace(info, name=f"blk.{at}.{info.name.removeprefix(begin)}") for info in of_layer]
    windows = tuple(config.windows[layer] for layer in layers)
    return Miniature(replace(config, n_layers=len(layers), windows=windows), found)


def layer_of(name: str) -> int | None:
    """Of a canonical tensor."""
    return int(name.split(".")[1]) if name.startswith("blk.") else None


def kinds_of(config: ModelConfig, infos: Sequence[TensorInfo]) -> dict[Kind, list[int]]:
    """The layers of each kind."""
    tensors: dict[int, list[tuple[str, str, tuple[int, ...]]]] = {layer: [] for layer in range(config.n_layers)}
    for info in infos:
        layer = layer_of(info.name)
        if layer is not None:
            tensors[layer].append((info.name.split(".", 2)[2], info.type, info.shape))
    found: dict[Kind, list[int]] = {}
    for layer, names in tensors.items():
        found.setdefault((config.windows[layer], tuple(sorted(names))), []).append(layer)
    return found


def some_layers(kinds: Mapping[Kind, Sequence[int]], infos: Sequence[TensorInfo]) -> int:
    """How many layers of each kind the least miniature has."""
    sizes = Counter[int]()
    for info in infos:
        layer = layer_of(info.name)
        if layer is not None:
            sizes[layer] += info.nbytes
    smallest = min(max(sizes[layers[0]], 1) for layers in kinds.values())
    return max(FEWEST, -(-MUCH // (smallest * len(kinds))))


def extrapolated(
    kinds: Mapping[Kind, Sequence[int]], n: int, measure: Callable[[Sequence[int]], Sequence[Seconds]]
) -> list[Seconds]:
    """At each depth, of the whole model. `measure` takes the layers of a miniature."""
    n_layers = sum(map(len, kinds.values()))
    while n * (len(kinds) + 1) < n_layers:
        some = [layer for layers in kinds.values() for layer in [layers[0]] * n]
        least = measure(some)
        found, grown = list(least), True
        for layers in kinds.values():
            more = measure(some + [layers[0]] * n)
            grown = grown and all(a.step > (1 + GROWTH / len(kinds)) * b.step for a, b in zip(more, least, strict=True))
            for at, (a, b) in enumerate(zip(more, least, strict=True)):
                each = Seconds((a.step - b.step) / n, max(a.first - b.first, 0) / n)
                found[at] = found[at].plus(each, len(layers) - n)
        if grown:
            return found
        n *= 2
    return list(measure(sorted(layer for layers in kinds.values() for layer in layers)))


def foreseen(
    backend: Backend,
    checkpoint: Checkpoint,
    config: CacheConfig,
    max_tokens: int,
    depths: Sequence[int],
    progress: Progress,
) -> list[Seconds]:
    """At each depth, on this backend's device."""
    infos, context = checkpoint.infos, max(depths) + TOKENS + 1
    kinds = kinds_of(checkpoint.config, infos)
    ids = RandomIds(checkpoint.config.vocab_size, context)
    done, n = 0, len(kinds) + 1

    def measure(layers: Sequence[int]) -> list[Seconds]:
        nonlocal done
        progress("measuring the device", min(done, n), n)
        small = miniature(checkpoint.config, infos, layers)
        asked = replace(config, layers=small.config.layer_specs, context=context, max_seqs=1, cache_bytes=None)
        planned = plan(replace(asked, max_chunk=min(max_tokens, context), ahead=backend.ahead), backend.default_layout)
        graph = graph_of(small.config, small.shapes)
        program = backend.load(cast(Checkpoint, small), graph, max_tokens, lambda *_: None)
        engine = Engine(program, backend.memory(planned), KVCache(planned), EngineConfig(max_tokens))
        warm_up(engine, max(depths), ids(len(depths), context))
        done += 1
        return [_seconds(measured_at(engine, depth, ids(at, context))) for at, depth in enumerate(depths)]

    found = extrapolated(kinds, some_layers(kinds, infos), measure)
    progress("measuring the device", n, n)
    return found


def _seconds(measured: Measured) -> Seconds:
    return Seconds(1 / measured.decode_tok_s, measured.first_token_s)


def figure(checkpoint: Checkpoint, config: CacheConfig, max_tokens: int) -> str:
    """What measured seconds are kept by: everything that they depend on, but the depth."""
    model = checkpoint.config
    cache = (config.strategy, config.codec, config.layout, config.block_size, config.window, config.pinned)
    kinds = [(kind, len(layers)) for kind, layers in kinds_of(model, checkpoint.infos).items()]
    facts = (replace(model, name="", context=0, windows=()), kinds, cache, max_tokens)
    others = [(info.name, info.type, info.shape) for info in checkpoint.infos if layer_of(info.name) is None]
    return blake2b(repr((facts, others)).encode(), digest_size=8).hexdigest()
