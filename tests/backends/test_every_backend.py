"""What every backend of the table must do, through the interface of backends/base.py alone. tests/gpu has cuda."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support import tiny_gguf
from support.harness import RUNNABLE, bits
from support.tiny_models import ARCHITECTURES, GOLDEN

from kvarn.backends import open_backend
from kvarn.backends.base import Backend
from kvarn.cache.cache import KVCache
from kvarn.cache.codec import CODECS
from kvarn.cache.plan import CacheConfig, plan
from kvarn.engine.scoring import score
from kvarn.loading.checkpoint import open_checkpoint
from kvarn.loading.progress import quiet
from kvarn.models.families import graph_of

TEXT = np.random.default_rng(7).integers(0, GOLDEN.vocab_size, 40).tolist()


class Loaded:
    """A model on a backend, and an empty cache."""

    def __init__(self, path: Path, backend: Backend, codec: str = "f32") -> None:
        checkpoint = open_checkpoint(path)
        settings = dict(strategy="paged", codec=codec, block_size=max(16, CODECS[codec].tail), max_chunk=len(TEXT))
        planned = plan(CacheConfig(checkpoint.config.layer_specs, 64, **settings), backend.default_layout)
        graph = graph_of(checkpoint.config, checkpoint.shapes)
        self.cache, self.memory = KVCache(planned), backend.memory(planned)
        self.program = backend.load(checkpoint, graph, len(TEXT), quiet)

    def logits(self, chunk: int) -> np.ndarray:
        return score(self.program, self.memory, self.cache, TEXT, 0, chunk)

    def hidden(self, rows: Sequence[int]) -> np.ndarray:
        self.cache.open(0)
        assert self.cache.reserve(0, len(TEXT))
        found = self.program.hidden(self.memory, self.cache.prepare([0]), TEXT, rows).copy()
        self.cache.advance(0, len(TEXT))
        self.cache.free(0)
        return found


def near(found: np.ndarray, oracle: np.ndarray) -> bool:
    return found.shape == oracle.shape and bool(np.abs(found - oracle).max() < 1e-3 * np.abs(oracle).max())


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_gives_what_the_reference_gives(architecture: str, name: str, tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf", architecture)
    oracle, ours = (Loaded(path, open_backend(each, 1)) for each in ("reference", name))
    found = ours.logits(len(TEXT))
    assert near(found, oracle.logits(len(TEXT)))
    for chunk in (1, 7):
        assert (bits(ours.logits(chunk)) == bits(found)).all(), "a row does not depend on the rows beside it"
    rows = [0, 3, len(TEXT) - 1]
    assert near(ours.hidden(rows), oracle.hidden(rows))


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize("codec", CODECS)
def test_a_block_moves_from_the_reference_and_back(codec: str, name: str, tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf", "llama")
    filled, ours = (Loaded(path, open_backend(each, 1), codec) for each in ("reference", name))
    filled.logits(len(TEXT))
    held = [filled.memory.read_block(0, block) for block in range(2)]
    assert held[0] != held[1]
    for block, data in enumerate(held):
        ours.memory.write_block(0, block, data)
    assert [ours.memory.read_block(0, block) for block in range(2)] == held
