"""A folder as on the Hugging Face hub: config.json and model.safetensors, or an index and its shards.

The `safetensors` package checks the header of each file (offsets in order, no holes, nothing past the
end). It cannot return bf16 to NumPy. So kvarn reads the bytes at the offsets of the checked header.
Non-goals: names and settings (tensors.py, hf_config.py), pickled weights.
"""

import json
from os import PathLike
from pathlib import Path
from struct import unpack
from typing import Any

from kvarn.arrays import Bytes, Floats
from kvarn.errors import BadModel
from kvarn.loading.encodings import TensorInfo
from kvarn.loading.file_bytes import FileBytes
from kvarn.loading.quants import dequantize

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_AGAIN = "fetch the folder again"


class SafetensorsFolder:
    """`config` as it stands in the file, `tensors` by the names they are stored under, `raw` and `load`."""

    def __init__(
        self, path: Path, config: dict[str, Any], tensors: dict[str, TensorInfo], files: dict[str, FileBytes]
    ) -> None:
        self.path = path
        self.config = config
        self.tensors = tensors
        self._files = files  # by the tensor's name

    @classmethod
    def open(cls, path: str | PathLike[str]) -> "SafetensorsFolder":
        path = Path(path)
        config = _read_json(path / "config.json", "it holds the model's shape")
        tensors: dict[str, TensorInfo] = {}
        files: dict[str, FileBytes] = {}
        for file, names in _shards(path).items():
            found, opened = _open_file(path / file)
            for name in found if names is None else names:
                if name not in found:
                    raise BadModel(f"{path / file} has no tensor {name}, which {_INDEX} puts there; {_AGAIN}")
                tensors[name], files[name] = found[name], opened
        return cls(path, config, tensors, files)

    def raw(self, name: str) -> Bytes:
        info = self.tensors.get(name)
        if info is None:
            raise BadModel(f"{self.path} has no tensor {name}; ask for one of `tensors`")
        return self._files[name].read(info.offset, info.offset + info.nbytes)

    def file(self, name: str) -> FileBytes:
        """The file that has the tensor, at its offset."""
        return self._files[name]

    def load(self, name: str) -> Floats:
        raw = self.raw(name)
        return dequantize(raw, self.tensors[name].type, self.tensors[name].shape)


def _read_json(path: Path, purpose: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as e:
        raise BadModel(f"{path} cannot be read: {e.strerror or e}; {purpose}, {_AGAIN}") from None
    except (ValueError, RecursionError) as e:
        raise BadModel(f"{path} is not JSON: {e}; {_AGAIN}") from None
    if not isinstance(value, dict):
        raise BadModel(f"{path} holds no JSON object; {_AGAIN}")
    return value


def _shards(path: Path) -> dict[str, list[str] | None]:
    """The tensors to take from each file; None for all it has."""
    if (path / _SINGLE).is_file():
        return {_SINGLE: None}
    if not (path / _INDEX).is_file():
        raise BadModel(f"{path} has neither {_SINGLE} nor {_INDEX}; {_AGAIN}, in the safetensors format")
    weight_map = _read_json(path / _INDEX, "it lists the shards").get("weight_map")
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


def _open_file(path: Path) -> tuple[dict[str, TensorInfo], FileBytes]:
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
    infos = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            infos[name] = TensorInfo(name, entry["dtype"], tuple(entry["shape"]), 8 + length + start, end - start)
    return infos, file
