"""Where each canonical tensor is in a file, and what must be done to the stored numbers.

models/tensors.py defines canonical tensors. A `TensorPiece` says which stored tensor holds a canonical
tensor. A `Storage` has the names and the storage rules of one file. `gguf_storage` and `hf_storage` make
it from the rules of the family.
Non-goals: bytes (checkpoint.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvarn.errors import BadModel
from kvarn.loading.encodings import TensorInfo
from kvarn.models.config import ModelConfig
from kvarn.models.family import Family
from kvarn.models.tensors import Fused, Shape, Tensor, outer_tensors


class RowRange(NamedTuple):
    start: int
    stop: int
    total: int  # rows of the fused tensor


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A canonical tensor as a part of a stored one."""

    source: str
    shape: Shape  # of the canonical tensor
    rows: RowRange | None = None  # None: all rows
    n_paired_heads: int = 0  # so many heads have their rotated rows stored as adjacent pairs
    plus: float = 0.0  # to be added to the stored numbers


@dataclass(frozen=True, slots=True)
class Storage:
    """How one file stores the tensors of a family."""

    names: Mapping[str, str]  # canonical name: stored name
    fused: Mapping[str, tuple[str, ...]]  # stored name: the canonical names of its parts
    adjacent_pairs: bool = False
    norm_offset: float = 0.0
    ignored: tuple[str, ...] = ()  # a stored tensor with such a part in its name is not used

    def piece(self, name: str, tensor: Tensor, rows: RowRange | None = None, source: str | None = None) -> TensorPiece:
        return TensorPiece(
            source or self.names[name],
            tensor.shape,
            rows,
            tensor.rotated_heads if self.adjacent_pairs else 0,
            self.norm_offset if tensor.is_norm else 0.0,
        )


def gguf_storage(family: Family, config: ModelConfig) -> Storage:
    """Canonical names are GGUF's."""
    return Storage(
        names={name: name for name in family.tensors(config)},
        fused=_fused(family, config, "blk.", {each: each.gguf for each in family.fused}),
        adjacent_pairs=family.gguf.adjacent_pairs,
    )


def hf_storage(family: Family, config: ModelConfig, stored: Mapping[str, TensorInfo], tied: bool) -> Storage:
    """`tied`: the folder has no output matrix, or one that repeats the embedding."""
    outer = {name: tensor.hf for name, tensor in outer_tensors(config).items() if tensor.hf is not None}
    embedding, head = outer["token_embd.weight"], outer.pop("output.weight")
    # "model." or, in a multimodal model, a longer prefix around the text model.
    prefix = next((name.removesuffix(embedding) for name in stored if name.endswith(embedding)), "model.")
    head = next((name for name in stored if name.endswith(head)), head)
    names = {name: prefix + hf for name, hf in outer.items()} | ({} if tied else {"output.weight": head})
    layers = f"{prefix}layers."
    for i in range(config.n_layers):
        names |= {f"blk.{i}.{name}": f"{layers}{i}.{tensor.hf}" for name, tensor in family.layer(config).items()}
    return Storage(
        names,
        _fused(family, config, layers, {each: each.hf for each in family.fused}),
        norm_offset=family.hf.norm_offset,
        ignored=("rotary_emb.inv_freq", *([head] if tied else []), *family.hf.ignored),
    )


def _fused(family: Family, config: ModelConfig, layers: str, names: Mapping[Fused, str]) -> dict[str, tuple[str, ...]]:
    """Weights and biases are fused alike, for parts that may have a bias."""
    canonical = family.layer(config)
    return {
        f"{layers}{i}.{name}.{kind}": tuple(f"blk.{i}.{part}.{kind}" for part in fused.parts)
        for i in range(config.n_layers)
        for fused, name in names.items()
        for kind in ("weight", "bias")
        if all(f"{part}.{kind}" in canonical for part in fused.parts)
    }


def find_tensors(
    where: str, family: Family, config: ModelConfig, storage: Storage, stored: Mapping[str, TensorInfo]
) -> dict[str, TensorPiece]:
    """All canonical tensors. Raise if one is missing, has a wrong shape or is unknown."""
    tensors = family.tensors(config)
    pieces = _pieces(tensors, storage, stored)
    for name, tensor in tensors.items():
        if name in pieces:
            info, rows = stored[pieces[name].source], pieces[name].rows
            wanted = tensor.shape if rows is None else (rows.total, *tensor.shape[1:])
            if info.shape != wanted:
                raise BadModel(f"{where}: tensor {info.name} is {info.shape}, not {wanted}; fetch the model again")
        elif tensor.required:
            raise BadModel(f"{where} has no tensor {name}, which {family.name} needs; fetch the model again")
    used = {piece.source for piece in pieces.values()}
    for name in stored:
        if name not in used and not any(part in name for part in storage.ignored):
            has = f"{where} has the tensor {name}, which a {family.name} model has no use for"
            raise BadModel(f"{has}; use a plain model, without adapters or experts")
    return {name: pieces[name] for name in tensors if name in pieces}


def _pieces(
    tensors: Mapping[str, Tensor], storage: Storage, stored: Mapping[str, TensorInfo]
) -> dict[str, TensorPiece]:
    split: dict[str, TensorPiece] = {}
    for source, parts in storage.fused.items():
        # A fused tensor may have the name that its last part has in files that do not fuse.
        if source in stored and storage.names[parts[0]] not in stored:
            start, total = 0, sum(tensors[name].shape[0] for name in parts)
            for name in parts:
                stop = start + tensors[name].shape[0]
                split[name] = storage.piece(name, tensors[name], RowRange(start, stop, total), source)
                start = stop
    whole = {name: storage.piece(name, tensor) for name, tensor in tensors.items() if storage.names.get(name) in stored}
    return whole | split
