"""A model from a file of either kind: its configuration and its canonical tensors.

`open_checkpoint` takes a GGUF file or a Hugging Face folder and checks all of it, so no tensor is
found missing later. `tensor` gives float32. `encoded` gives the stored bytes, for backends that
multiply without widening; `read_rows` reads a part of them, and `in_file` says where they are, if they
can be taken as they are. A checkpoint does not keep loaded tensors; the caller does.
Non-goals: fetching (pull.py); names of tensors (tensors.py); tokenizers.
"""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from kvarn.arrays import Bytes, Floats
from kvarn.errors import BadModel
from kvarn.loading.encodings import ENCODINGS, TensorInfo
from kvarn.loading.file_bytes import FileBytes
from kvarn.loading.gguf import GGUFFile
from kvarn.loading.gguf_config import gguf_config
from kvarn.loading.hf_config import hf_config, hf_family
from kvarn.loading.quants import READABLE, dequantize
from kvarn.loading.safetensors import SafetensorsFolder
from kvarn.loading.tensors import TensorPiece, find_tensors, gguf_storage, hf_storage
from kvarn.models.config import ModelConfig
from kvarn.models.families import family_of

Kind = Literal["gguf", "safetensors"]


class Source(Protocol):
    @property
    def path(self) -> Path: ...
    @property
    def tensors(self) -> dict[str, TensorInfo]: ...
    def file(self, name: str) -> FileBytes: ...


class InFile(NamedTuple):
    """A canonical tensor whose bytes are consecutive in a file."""

    file: FileBytes
    info: TensorInfo
    n_rows: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """A canonical tensor's bytes."""

    type: str
    shape: tuple[int, ...]
    rows: Bytes  # [rows, bytes of a row]


class Checkpoint:
    def __init__(
        self,
        source: Source,
        kind: Kind,
        config: ModelConfig,
        pieces: dict[str, TensorPiece],
        metadata: dict[str, Any],
    ) -> None:
        self.path = source.path
        self.kind = kind
        self.config = config
        self.metadata = metadata  # GGUF's keys; a folder has none
        self.folder = source.path if kind == "safetensors" else None  # contains tokenizer.json
        self._source = source
        self._pieces = pieces
        self.infos: list[TensorInfo] = [self._info(name, piece) for name, piece in pieces.items()]
        self.shapes = {info.name: info.shape for info in self.infos}
        self._info_of = {info.name: info for info in self.infos}

    def has(self, name: str) -> bool:
        """A model without `output.weight` uses its embedding instead."""
        return name in self._pieces

    def tensor(self, name: str) -> Floats:
        piece, stored = self._piece(name), self._stored(name)
        numbers = dequantize(stored.rows, stored.type, stored.shape)
        if piece.plus:
            numbers += np.float32(piece.plus)
        return numbers

    def encoded(self, name: str) -> Encoded:
        if not self._piece(name).plus:
            return self._stored(name)
        numbers = self.tensor(name)
        return Encoded("F32", numbers.shape, numbers.reshape(-1, numbers.shape[-1]).view(np.uint8))

    def read_rows(self, name: str, start: int, out: Bytes) -> None:
        """Bytes of a tensor's rows from `start` on, as they are stored; `out` is [rows, bytes of a row]. For threads
        that read parts of a tensor whose numbers are not changed."""
        piece, info = self._piece(name), self._info_of[name]
        assert not piece.plus
        file, row = self._source.file(piece.source), out.shape[1]
        if not piece.n_paired_heads:
            file.read_into(info.offset + start * row, out)
            return
        order = _halves_from_pairs(piece.n_paired_heads, self.config.head_dim, self.config.rope.dim)
        wanted = order[start : start + len(out)]
        first, last = wanted.min(), wanted.max()  # of one head, or of a few
        rows = file.read(info.offset + int(first) * row, info.offset + (int(last) + 1) * row)
        np.take(rows.reshape(-1, row), wanted - first, 0, out, "clip")

    def in_file(self, name: str) -> InFile | None:
        """None: its rows must be moved, or its numbers changed."""
        piece = self._piece(name)
        return None if piece.plus or piece.n_paired_heads else self.place(name)

    def place(self, name: str) -> InFile:
        """Where a tensor's stored bytes are, whatever must be done to them."""
        piece, info = self._piece(name), self._info_of[name]
        n_rows = info.nbytes // ENCODINGS[info.type].row_bytes(info.shape[-1])
        return InFile(self._source.file(piece.source), info, n_rows)

    def _piece(self, name: str) -> TensorPiece:
        if name not in self._pieces:
            raise BadModel(f"{self.path} has no tensor {name}; ask `has` first for those that a model may lack")
        return self._pieces[name]

    def _stored(self, name: str) -> Encoded:
        piece, info = self._pieces[name], self._info_of[name]
        rows = self._source.file(piece.source).read(info.offset, info.offset + info.nbytes)
        if piece.n_paired_heads:  # the elements of a vector are its rows here: a bias is moved like its weights
            rows = rows.reshape(info.shape[0], -1)
            rows = rows[_halves_from_pairs(piece.n_paired_heads, self.config.head_dim, self.config.rope.dim)]
        return Encoded(info.type, info.shape, rows.reshape(-1, ENCODINGS[info.type].row_bytes(info.shape[-1])))

    def _info(self, name: str, piece: TensorPiece) -> TensorInfo:
        info, shape = self._source.tensors[piece.source], piece.shape
        if info.type not in READABLE:
            raise BadModel(
                f"{self.path}: tensor {info.name} is {info.type}, which kvarn does not read; convert it to F16"
            )
        if ENCODINGS[info.type].block_size > 1 and len(shape) == 1 and (piece.rows or piece.n_paired_heads):
            raise BadModel(f"{self.path}: tensor {info.name} is {info.type}, and a bias may not be; convert it to F32")
        if piece.rows is None:
            return TensorInfo(name, info.type, shape, info.offset, info.nbytes)
        row = info.nbytes // info.shape[0]
        start, stop, _ = piece.rows
        return TensorInfo(name, info.type, shape, info.offset + start * row, (stop - start) * row)


def _halves_from_pairs(n_heads: int, head_dim: int, rope_dim: int) -> Any:
    """The stored row of each canonical row: 0 2 4 .. 1 3 5 .. in the rotated part of a head."""
    head = np.arange(head_dim)
    head[:rope_dim] = np.arange(rope_dim).reshape(-1, 2).T.ravel()
    return (np.arange(n_heads)[:, None] * head_dim + head).ravel()  # [n_heads * head_dim]


def open_checkpoint(path: str | PathLike[str]) -> Checkpoint:
    """A .gguf file or a folder with config.json and safetensors."""
    path = Path(path)
    return _open_folder(path) if path.is_dir() else _open_file(path)


def _open_file(path: Path) -> Checkpoint:
    return of_gguf(GGUFFile.open(path))


def of_gguf(file: GGUFFile) -> Checkpoint:
    config = gguf_config(file)
    family = family_of(config)
    pieces = find_tensors(str(file.path), family, config, gguf_storage(family, config), file.tensors)
    return Checkpoint(file, "gguf", config, pieces, file.metadata)


def _open_folder(path: Path) -> Checkpoint:
    if not (path / "config.json").exists():
        files = ", ".join(sorted(each.name for each in path.glob("*.gguf"))[:3])
        what = f"it holds {files}: give such a file" if files else "give a .gguf file or a folder with safetensors"
        raise BadModel(f"{path} has no config.json, so it is no model; {what}")
    return of_safetensors(SafetensorsFolder.open(path))


def of_safetensors(folder: SafetensorsFolder) -> Checkpoint:
    path = folder.path
    config = hf_config(path, folder.config, len(folder.tensors))
    family, settings = hf_family(path, folder.config)
    tied = settings.flag("tie_word_embeddings", False)
    storage = hf_storage(family, config, folder.tensors, tied)
    pieces = find_tensors(str(path), family, config, storage, folder.tensors)
    if not tied and "output.weight" not in pieces:
        raise BadModel(f"{path} has no tensor lm_head.weight, and its config.json does not tie it; fetch it again")
    return Checkpoint(folder, "safetensors", config, pieces, {})
