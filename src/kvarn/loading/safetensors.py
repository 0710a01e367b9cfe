"""A folder as on the Hugging Face hub: config.json and model.safetensors, or an index and its shards.

The `safetensors` package checks the header of each file (offsets in order, no holes, nothing past the
end). It cannot return bf16 to NumPy. So kvarn reads the bytes at the offsets of the checked header.
Non-goals: names and settings (tensors.py, hf_config.py), pickled weights.
"""

import json
from math import prod
from os import PathLike
from pathlib import Path
from struct import error as StructError
from struct import unpack
from typing import Any, Protocol

from kvarn.arrays import Bytes, Floats
from kvarn.errors import BadModel, printable
from kvarn.loading.encodings import ENCODINGS, TensorInfo
from kvarn.loading.file_bytes import ByteSource, FileBytes, on_disk
from kvarn.loading.quants import dequantize

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_AGAIN = "fetch the folder again"
_LONGEST_HEADER = 100_000_000  # bytes; that of the `safetensors` package


class Files(Protocol):
    """The files of a model: a folder of this machine, or one on the hub (hub_headers.py)."""

    @property
    def path(self) -> Path:
        """For messages."""

    def has(self, name: str) -> bool: ...

    def text(self, name: str) -> bytes:
        """A small file. Raises OSError."""

    def tensors(self, name: str) -> tuple[dict[str, TensorInfo], ByteSource]:
        """The checked header of a safetensors file, and the file."""


class Folder:
    """Of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def text(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def tensors(self, name: str) -> tuple[dict[str, TensorInfo], ByteSource]:
        return _open_file(self.path / name)


class SafetensorsFolder:
    """`config` as it stands in the file, `tensors` by the names they are stored under, `raw` and `load`."""

    def __init__(
        self, path: Path, config: dict[str, Any], tensors: dict[str, TensorInfo], files: dict[str, ByteSource]
    ) -> None:
        self.path = path
        self.config = config
        self.tensors = tensors
        self._files = files  # by the tensor's name

    @classmethod
    def open(cls, path: str | PathLike[str]) -> "SafetensorsFolder":
        return cls.of(Folder(Path(path)))

    @classmethod
    def of(cls, files: Files) -> "SafetensorsFolder":
        config = _read_json(files, "config.json", "it holds the model's shape")
        tensors: dict[str, TensorInfo] = {}
        opened: dict[str, ByteSource] = {}
        for file, names in _shards(files).items():
            found, source = files.tensors(file)
            for name in found if names is None else names:
                if name not in found:
                    raise BadModel(f"{files.path / file} has no tensor {name}, which {_INDEX} puts there; {_AGAIN}")
                tensors[name], opened[name] = found[name], source
        return cls(files.path, config, tensors, opened)

    def raw(self, name: str) -> Bytes:
        info = self.tensors.get(name)
        if info is None:
            raise BadModel(f"{self.path} has no tensor {name}; ask for one of `tensors`")
        return self._files[name].read(info.offset, info.offset + info.nbytes)

    def file(self, name: str) -> FileBytes:
        """The file that has the tensor, at its offset."""
        return on_disk(self.path, self._files[name])

    def load(self, name: str) -> Floats:
        raw = self.raw(name)
        return dequantize(raw, self.tensors[name].type, self.tensors[name].shape)


def _read_json(files: Files, name: str, purpose: str) -> dict[str, Any]:
    path = files.path / name
    try:
        value = json.loads(files.text(name))
    except OSError as e:
        raise BadModel(f"{path} cannot be read: {e.strerror or e}; {purpose}, {_AGAIN}") from None
    except (ValueError, RecursionError) as e:
        raise BadModel(f"{path} is not JSON: {e}; {_AGAIN}") from None
    if not isinstance(value, dict):
        raise BadModel(f"{path} holds no JSON object; {_AGAIN}")
    return value


def _shards(files: Files) -> dict[str, list[str] | None]:
    """The tensors to take from each file; None for all it has."""
    path = files.path
    if files.has(_SINGLE):
        return {_SINGLE: None}
    if not files.has(_INDEX):
        raise BadModel(f"{path} has neither {_SINGLE} nor {_INDEX}; {_AGAIN}, in the safetensors format")
    weight_map = _read_json(files, _INDEX, "it lists the shards").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadModel(f"{path / _INDEX} has no weight_map; {_AGAIN}")
    shards: dict[str, list[str] | None] = {}
    for name, file in weight_map.items():
        # A name that leads out of the folder is no shard of this model.
        if not isinstance(file, str) or Path(file).name != file:
            raise BadModel(f"{path / _INDEX} puts {name} into {file!r}, which is no file name; {_AGAIN}")
        names = shards.setdefault(file, [])
        assert names is not None
        names.append(name)
    return shards


def _open_file(path: Path) -> tuple[dict[str, TensorInfo], ByteSource]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
        file = FileBytes(path)
        (length,) = unpack("<Q", file.read(0, 8).tobytes())
        header = json.loads(file.read(8, 8 + length).tobytes())
    except FileNotFoundError:
        raise BadModel(f"{path} is missing; {_AGAIN}") from None
    except OSError as e:
        raise BadModel(f"{path} cannot be read: {e.strerror or e}; check its permissions") from None
    except (SafetensorError, ValueError) as e:
        raise BadModel(f"{path} is cut short or damaged: {e}; {_AGAIN}") from None
    return _infos(header, length), file


def _infos(header: dict[str, Any], length: int) -> dict[str, TensorInfo]:
    """Of a header that was checked, of this many bytes."""
    infos = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            infos[name] = TensorInfo(name, entry["dtype"], tuple(entry["shape"]), 8 + length + start, end - start)
    return infos


def header_of(path: Path, file: ByteSource) -> dict[str, TensorInfo]:
    """The header of a file that the `safetensors` package cannot open, checked as far as sizes need it."""
    try:
        (length,) = unpack("<Q", file.read(0, min(8, file.size)).tobytes())
        if not 2 <= length <= min(_LONGEST_HEADER, file.size - 8):
            raise ValueError(f"its header would have {length} bytes")
        header = json.loads(file.read(8, 8 + length).tobytes())
        infos = _infos(header, length)
        for info in infos.values():
            _check(info, 8 + length, file.size)
    except (StructError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise BadModel(f"{path} is damaged: {printable(str(e), 200)}; try another model") from None
    return infos


def _check(info: TensorInfo, data: int, size: int) -> None:
    whole = all(type(each) is int for each in (*info.shape, info.offset, info.nbytes))
    if not isinstance(info.type, str) or not whole or min((*info.shape, info.nbytes), default=0) < 0:
        raise ValueError(f"the entry of {info.name} is no tensor")
    if not data <= info.offset <= info.offset + info.nbytes <= size:
        raise ValueError(f"the tensor {info.name} ends past the end of the file")
    if (known := ENCODINGS.get(info.type)) and info.nbytes * known.block_size != prod(info.shape) * known.block_bytes:
        raise ValueError(f"the tensor {info.name} has {info.nbytes} bytes, which do not fit its shape")
