"""Files that become shorter or cannot be read while a model is loaded: one line, never a signal."""

import os
from pathlib import Path

import numpy as np
import pytest
from support.harness import pool
from support.tiny_files import write_gguf, write_hf
from support.tiny_models import ARCHITECTURES

from kvarn import native
from kvarn.backends.cpu.program import pack
from kvarn.errors import BadModel
from kvarn.loading.checkpoint import open_checkpoint
from kvarn.loading.file_bytes import FileBytes
from kvarn.loading.gguf import GGUFFile


def written(tmp_path: Path, kind: str, architecture: str) -> tuple[Path, Path]:
    """What to open, and the file with the tensors."""
    if kind == "gguf":
        return (path := write_gguf(tmp_path / "m.gguf", architecture)), path
    return (folder := write_hf(tmp_path / "hf", architecture)), folder / "model.safetensors"


@pytest.mark.parametrize("kind", ["gguf", "folder"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_that_becomes_shorter_while_it_is_loaded(tmp_path: Path, kind: str, architecture: str) -> None:
    path, file = written(tmp_path, kind, architecture)
    checkpoint = open_checkpoint(path)
    whole = {name: checkpoint.tensor(name) for name in checkpoint.shapes}
    last = max(checkpoint.infos, key=lambda info: info.offset)
    os.truncate(file, last.offset + last.nbytes - 1)
    for info in checkpoint.infos:
        if info is last:
            for load in (checkpoint.tensor, checkpoint.encoded, lambda name: pack(checkpoint, name, pool())):
                with pytest.raises(BadModel, match="has become shorter while it was read; fetch it again"):
                    load(last.name)
        else:
            assert np.array_equal(checkpoint.tensor(info.name), whole[info.name])


def test_a_header_that_becomes_shorter_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama")
    opened = FileBytes.__init__

    def cut(self: FileBytes, path: Path) -> None:
        opened(self, path)
        os.truncate(path, 100)

    monkeypatch.setattr(FileBytes, "__init__", cut)
    with pytest.raises(BadModel, match="has become shorter while it was read"):
        GGUFFile.open(path)


def test_a_disk_that_fails(tmp_path: Path) -> None:
    """The descriptor is gone: every read is an error of the system."""
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "qwen2"))
    file = checkpoint.in_file("blk.0.ffn_up.weight").file
    os.dup2(os.open(tmp_path, os.O_RDONLY), file.fileno())  # a folder cannot be read
    for load in (checkpoint.tensor, lambda name: pack(checkpoint, name, pool())):
        with pytest.raises(BadModel, match=r"m.gguf cannot be read: Is a directory; check its disk"):
            load("blk.0.ffn_up.weight")


@pytest.mark.parametrize("n_rows", [1, 15, 16, 17, 300, 5000])
@pytest.mark.parametrize("threads", [1, 3])
def test_packed_from_a_file_as_from_memory(tmp_path: Path, n_rows: int, threads: int) -> None:
    rows = np.random.default_rng(n_rows).integers(0, 256, (n_rows, 4 * 34), np.uint8)
    path = tmp_path / "rows"
    path.write_bytes(b"head" + rows.tobytes())
    file = FileBytes(path)
    packed = native.pack_file(pool(threads), "Q8_0", file.fileno(), 4, n_rows, 128)
    expected = native.pack(pool(threads), "Q8_0", rows, 128)
    found, wanted = (np.empty((n_rows, 128), np.float32) for _ in range(2))
    packed.unpack(found)
    expected.unpack(wanted)
    assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))
    with pytest.raises(EOFError):
        native.pack_file(pool(threads), "Q8_0", file.fileno(), 5, n_rows, 128)
    with pytest.raises(ValueError, match="pack_file"):
        native.pack_file(pool(threads), "Q8_0", file.fileno(), 4, 0, 128)
