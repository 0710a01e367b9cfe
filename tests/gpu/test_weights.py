"""Weights on the device are those of the file, read in pieces of any size by threads."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gpu.support.launching import decoded
from gpu.support.models import write
from support.tiny_models import GOLDEN

from kvarn import native
from kvarn.backends.cuda import staging
from kvarn.backends.cuda.specs import TYPE_BYTES
from kvarn.backends.cuda.weights import Weights
from kvarn.errors import BadModel
from kvarn.loading.checkpoint import Checkpoint, open_checkpoint
from kvarn.loading.progress import quiet
from kvarn.models.families import graph_of

SIZE = replace(GOLDEN, n_layers=1, n_heads=8, n_kv_heads=4, hidden=256, feed_forward=512)  # blocks of 256 fit
NUMBERS = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
QKV = tuple(f"blk.0.attn_{part}.weight" for part in "qkv")


def opened(tmp_path: Path, type_name: str, **changes: int) -> Checkpoint:
    return open_checkpoint(write(tmp_path / "tiny.gguf", "llama", type_name, replace(SIZE, **changes)))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvarn-weights")]


@pytest.mark.parametrize("piece", [2048, 5000, 1 << 20])
@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q3_K"])
def test_matrices(driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_name: str, piece: int) -> None:
    """q and k of a llama are stored in another order. Behind rows and matrices are zeros."""
    monkeypatch.setattr(staging, "PIECE", piece)
    checkpoint = opened(tmp_path, type_name, **({} if type_name == "Q3_K" else {"hidden": 200, "feed_forward": 97}))
    seen: list[tuple[int, int]] = []
    loaded = Weights(driver, checkpoint, 4, lambda what, done, total: seen.append((done, total)))
    groups = [QKV, ("blk.0.ffn_down.weight",)]
    matrices = [loaded.matrix(*names) for names in groups]
    loaded.finish()
    assert seen == [(0, 4), (3, 4), (4, 4)]
    for names, matrix in zip(groups, matrices, strict=True):
        expected = np.concatenate([checkpoint.tensor(name) for name in names])
        assert matrix.n_rows == len(expected)
        assert matrix.memory.nbytes == matrix.padded * matrix.depth * TYPE_BYTES[matrix.form]
        stored = driver.view(matrix.address, (matrix.padded, matrix.depth), NUMBERS[matrix.form])
        found = decoded(stored, matrix.form)
        expected = expected.astype(np.float16) if type_name == "Q3_K" else expected
        assert (found[: matrix.n_rows, : expected.shape[1]] == expected).all()
        assert not stored[matrix.n_rows :].any()
        assert not stored[:, expected.shape[1] :].any()


def test_vectors(driver, tmp_path: Path) -> None:
    """One after another. One without a name is zero."""
    checkpoint = opened(tmp_path, "F32")
    loaded = Weights(driver, checkpoint, 1, quiet)
    address = loaded.vectors((None, 3), ("blk.0.attn_norm.weight", 256), (None, 5))
    assert loaded.vectors((None, 3), ("blk.0.attn_norm.weight", 256), (None, 5)) == address
    loaded.finish()
    found = driver.view(address, (264,), np.float32)
    assert (found[3:259] == checkpoint.tensor("blk.0.attn_norm.weight")).all()
    assert not found[:3].any()
    assert not found[259:].any()


@pytest.mark.parametrize("type_name", ["BF16", "Q3_K", "Q4_0"])
def test_a_file_that_becomes_shorter(cuda, tmp_path: Path, type_name: str) -> None:
    """The error of a thread is the error of loading, and no thread is left."""
    checkpoint = opened(tmp_path, type_name)
    last = max(checkpoint.infos, key=lambda info: info.offset)
    os.truncate(tmp_path / "tiny.gguf", last.offset + last.nbytes - 1)
    with pytest.raises(BadModel, match="has become shorter while it was read"):
        _load(cuda, checkpoint)
    assert not threads()


def test_packing_that_fails(cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the pieces of a matrix does not wait for ever."""

    def fail(*args: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(native, "pack_planes", fail)
    with pytest.raises(MemoryError, match="no room"):
        _load(cuda, opened(tmp_path, "Q4_0"))
    assert not threads()


def _load(backend, checkpoint: Checkpoint) -> None:
    backend.load(checkpoint, graph_of(checkpoint.config, checkpoint.shapes), 16, quiet)
