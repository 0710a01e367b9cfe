"""Random models of every architecture as files, and a model on a backend with caches of any kind."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gpu.support.blocks import RANDOM, blocks
from numpy.typing import NDArray
from support import tiny_gguf
from support.gguf_writer import Tensor, gguf
from support.tiny_files import encode, gguf_keys, local_keys
from support.tiny_models import Size

from kvarn.backends.base import Backend
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig, plan
from kvarn.engine.config import EngineConfig
from kvarn.engine.engine import Engine
from kvarn.engine.recall import NO_TIERS, Tiers
from kvarn.engine.scoring import score
from kvarn.loading.checkpoint import Checkpoint, open_checkpoint
from kvarn.loading.encodings import BY_ID
from kvarn.loading.progress import quiet
from kvarn.models.families import graph_of

Floats = NDArray[np.float32]
IDS = {encoding.name: number for number, encoding in BY_ID.items()}


def write(
    path: Path,
    architecture: str,
    type_name: str,
    size: Size,
    outliers: Mapping[str, float] | None = None,
    others: Mapping[str, str] | None = None,
) -> Path:
    """A model with random weights, its matrices stored as `type_name`, or as `others` says for a part of a name. A
    tensor may have one outlier."""
    random = np.random.default_rng(len(architecture))
    keys = gguf_keys(architecture, size) | local_keys(architecture, size) | tiny_gguf.tokenizer_keys(tiny_gguf.CHAT)
    tensors = []
    for name, shape in tiny_gguf.stored_shapes(architecture, size).items():
        spread = 0.1 if "norm" in name else 1.5 * shape[-1] ** -0.5
        numbers = random.standard_normal(shape, np.float32) * np.float32(spread) + np.float32("norm" in name)
        if outliers and name in outliers:
            numbers[0, 0] = outliers[name]
        kind = next((kind for part, kind in (others or {}).items() if part in name), type_name)
        kind = kind if len(shape) == 2 else "F32"
        data = blocks(kind, shape, random, spread).tobytes() if kind in RANDOM else encode(numbers, kind)
        tensors.append(Tensor(name, data, tuple(reversed(shape)), IDS[kind]))
    path.write_bytes(gguf([(key, *value) for key, value in keys.items()], tensors))
    return path


def text(length: int, *seed: int) -> list[int]:
    found: list[int] = np.random.default_rng([11, *seed]).integers(0, 256, length).tolist()
    return found


class Loaded:
    """A model on a backend. Its caches come and go."""

    def __init__(self, path: Path, backend: Backend, max_tokens: int = 512) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(path)
        self.config, self.backend, self.max_tokens = self.checkpoint.config, backend, max_tokens
        graph = graph_of(self.config, self.checkpoint.shapes)
        self.program: Any = backend.load(self.checkpoint, graph, max_tokens, quiet)

    def cache(self, context: int, **settings: Any) -> tuple[Any, KVCache]:
        usual = {"strategy": "paged", "codec": "bf16", "max_chunk": context, "ahead": self.backend.ahead}
        settings = usual | settings
        planned = plan(CacheConfig(self.config.layer_specs, context, **settings), self.backend.default_layout)
        return self.backend.memory(planned), KVCache(planned)

    def logits(self, tokens: Sequence[int], chunk: int, first: int = 0, **settings: Any) -> Floats:
        """Teacher-forced, in chunks."""
        return score(self.program, *self.cache(len(tokens) + 1, **settings), tokens, first, chunk)

    def engine(
        self,
        context: int,
        max_batch_tokens: int,
        tiers: Callable[[KVCache, Any], Tiers] = lambda cache, memory: NO_TIERS,
        **settings: Any,
    ) -> Engine:
        memory, book = self.cache(context, **({"max_chunk": max_batch_tokens} | settings))
        return Engine(self.program, memory, book, EngineConfig(max_batch_tokens), tiers=tiers(book, memory))


class Batch:
    """Several sequences that are computed together, token by token or in runs."""

    def __init__(self, loaded: Loaded, context: int, max_seqs: int, **settings: Any) -> None:
        self.loaded = loaded
        self.memory, self.book = loaded.cache(context, **({"max_seqs": max_seqs} | settings))
        self.lengths: dict[int, int] = {}

    def step(self, new: dict[int, Sequence[int]]) -> dict[int, Floats]:
        """The logits of each sequence's last new token, [1, vocabulary]."""
        for seq, tokens in new.items():
            if seq not in self.lengths:
                self.book.open(seq, salt=str(seq).encode())
                self.lengths[seq] = 0
            if not self.book.reserve(seq, self.lengths[seq] + len(tokens)):
                raise AssertionError(f"no room for sequence {seq}")
        step = self.book.prepare(list(new))
        tokens = [token for seq in step.seqs for token in new[seq]]
        ends = np.cumsum([len(new[seq]) for seq in step.seqs])
        rows = self.loaded.program.run(self.memory, step, tokens, (ends - 1).tolist()).rows().copy()
        for seq in step.seqs:
            self.book.advance(seq, len(new[seq]))
            self.book.commit(seq, new[seq])
            self.lengths[seq] += len(new[seq])
        return {seq: rows[i : i + 1] for i, seq in enumerate(step.seqs)}
