"""Random models of every architecture on disk, and a model on the device with a cache of any kind."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support import tiny_gguf
from support.gguf_writer import TYPE_IDS, Tensor, gguf
from support.tiny_files import encode, gguf_keys, local_keys
from support.tiny_models import ARCHITECTURES, GOLDEN, Size

from kvarn.backends.base import Backend
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.engine.config import EngineConfig
from kvarn.engine.engine import Engine
from kvarn.engine.scoring import score
from kvarn.loading.checkpoint import Checkpoint, open_checkpoint
from kvarn.loading.progress import quiet
from kvarn.models.families import graph_of
from proof.site import Site

Floats = NDArray[np.float32]
MEDIUM = replace(GOLDEN, n_layers=6, n_heads=8, n_kv_heads=2, hidden=512, feed_forward=1408, context=2048, window=200)
SMALL = replace(MEDIUM, n_layers=2, context=1024)
TINY = replace(GOLDEN, n_layers=1, context=256, window=24)
HEAD_DIMS = dict(zip(ARCHITECTURES, (64, 128, 128, 256, 96), strict=True))
TYPES = ("BF16", "F16", "F32")


def size_of(site: Site, architecture: str) -> Size:
    size = site.pick(MEDIUM, SMALL, TINY)
    return size if site.interpreted else replace(size, head_dim=HEAD_DIMS[architecture])


def write(site: Site, architecture: str, type_name: str) -> Path:
    """A model with random weights, its matrices stored as `type_name`. Once per proof."""
    path = Path(site.folder.name) / f"{architecture}-{type_name}.gguf"
    if path.exists():
        return path
    size, random = size_of(site, architecture), site.random(len(architecture))
    keys = gguf_keys(architecture, size) | local_keys(architecture, size) | tiny_gguf.tokenizer_keys(None)
    tensors = []
    for name, shape in tiny_gguf.stored_shapes(architecture, size).items():
        spread = 0.1 if "norm" in name else 1.5 * shape[-1] ** -0.5
        numbers = random.standard_normal(shape, np.float32) * np.float32(spread) + np.float32("norm" in name)
        kind = type_name if len(shape) == 2 else "F32"
        tensors.append(Tensor(name, encode(numbers, kind), tuple(reversed(shape)), TYPE_IDS[kind]))
    path.write_bytes(gguf([(key, *value) for key, value in keys.items()], tensors))
    return path


class Loaded:
    """A model on a backend. Its caches come and go."""

    def __init__(self, path: Path, backend: Backend, max_tokens: int = 512) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(path)
        self.config, self.backend, self.max_tokens = self.checkpoint.config, backend, max_tokens
        graph = graph_of(self.config, self.checkpoint.shapes)
        self.program = backend.load(self.checkpoint, graph, max_tokens, quiet)

    def cache(self, context: int, **settings: Any) -> tuple[Any, KVCache]:
        settings = {"strategy": "paged", "codec": "bf16", "max_chunk": context} | settings
        planned = plan(CacheConfig(self.config.layer_specs, context, **settings), self.backend.default_layout)
        return self.backend.memory(planned), KVCache(planned)

    def logits(self, tokens: Sequence[int], chunk: int, first: int = 0, **settings: Any) -> Floats:
        """Teacher-forced, in chunks."""
        return score(self.program, *self.cache(len(tokens) + 1, **settings), tokens, first, chunk)

    def engine(self, context: int, max_batch_tokens: int, **settings: Any) -> Engine:
        memory, book = self.cache(context, **({"max_chunk": max_batch_tokens} | settings))
        return Engine(self.program, memory, book, EngineConfig(max_batch_tokens))


class Batch:
    """Several sequences that are computed together, token by token or in runs."""

    def __init__(self, loaded: Loaded, context: int, max_seqs: int, **settings: Any) -> None:
        self.loaded = loaded
        self.memory, self.book = loaded.cache(context, **({"max_seqs": max_seqs} | settings))
        self.texts: dict[int, list[int]] = {}

    def step(self, new: dict[int, Sequence[int]], all_rows: bool = False) -> dict[int, Floats]:
        """The logits of each sequence's last new token, or of all its new tokens."""
        for seq, tokens in new.items():
            if seq not in self.texts:
                self.book.open(seq, salt=str(seq).encode())
                self.texts[seq] = []
            if not self.book.reserve(seq, len(self.texts[seq]) + len(tokens)):
                raise AssertionError(f"no room for sequence {seq}")
        step = self.book.prepare(list(new))
        tokens = [token for seq in step.seqs for token in new[seq]]
        ends = np.cumsum([len(new[seq]) for seq in step.seqs])
        wanted = range(len(tokens)) if all_rows else [int(end) - 1 for end in ends]
        rows = self.loaded.program.run(self.memory, step, tokens, wanted).rows().copy()
        for seq in step.seqs:
            self.book.advance(seq, len(new[seq]))
            self.book.commit(seq, new[seq])
            self.texts[seq] += new[seq]
        parts = np.split(rows, ends[:-1] if all_rows else len(step.seqs))
        return dict(zip(step.seqs, parts, strict=True))


def text(site: Site, length: int, seed: int = 0) -> list[int]:
    found: list[int] = site.random(11, seed).integers(0, 256, length).tolist()
    return found
