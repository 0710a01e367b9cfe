"""Speeds of other engines from a file, measured earlier on the same device: for engines that cannot run beside kvarn.

    {"device": "NVIDIA H200",
     "models": {"1.1B": {"n_layers": 22, "hidden": 2048, "feed_forward": 5632, "vocab_size": 32000}},
     "rows": [{"engine": "vLLM 0.22", "model": "1.1B", "weights": "BF16",
               "test": "tg", "depth": 128, "batch": 1, "tok_s": 675}]}

A row belongs to a case if the model has this shape and mostly weights of this type, and test, depth and
batch are the case's. The length of a test matters for prompts only: "pp4096", but "tg".
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn.bench.case import PROMPT, Case
from kvarn.errors import KvarnError
from kvarn.loading.checkpoint import open_checkpoint
from kvarn.models.config import ModelConfig

SHAPE = ("n_layers", "hidden", "feed_forward", "vocab_size")
FIELDS = {"engine": str, "model": str, "weights": str, "test": str, "depth": int, "batch": int, "tok_s": int | float}


@dataclass(frozen=True, slots=True)
class Speed:
    engine: str
    tok_s: float


class Recorded:
    """The rows of a file that are about one model."""

    def __init__(self, path: Path, config: ModelConfig, weights: str, device: str) -> None:
        told = _read(path)
        if told["device"] != device:
            raise KvarnError(f"{path}: these speeds were measured on {told['device']!r}, and this is {device!r}")
        shapes = {name: tuple(shape.get(size) for size in SHAPE) for name, shape in told["models"].items()}
        ours = tuple(getattr(config, size) for size in SHAPE)
        self._speeds: dict[tuple[str, int, int], list[Speed]] = {}
        for row in told["rows"]:
            if shapes.get(row["model"]) == ours and row["weights"] == weights:
                key = (row["test"], row["depth"], row["batch"])
                self._speeds.setdefault(key, []).append(Speed(row["engine"], float(row["tok_s"])))
        if not self._speeds:
            shape = ", ".join(f"{size} {number}" for size, number in zip(SHAPE, ours, strict=True))
            raise KvarnError(f"{path}: it has no speeds of a model with {shape} and {weights} weights")

    def fastest(self, case: Case) -> Speed | None:
        test = case.name if case.kind == PROMPT else case.kind
        found = self._speeds.get((test, case.depth, case.batch), [])
        return max(found, key=lambda speed: speed.tok_s, default=None)


def main_type(path: Path) -> str:
    """The stored type of most bytes of a model's weights."""
    sizes: Counter[str] = Counter()
    for info in open_checkpoint(path).infos:
        sizes[info.type] += info.nbytes
    return sizes.most_common(1)[0][0]


def _read(path: Path) -> Mapping[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KvarnError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise KvarnError(f"{path}: it is not JSON") from None
    if not isinstance(told, dict) or not {"device", "models", "rows"} <= told.keys():
        raise KvarnError(f"{path}: a table of speeds has the fields device, models and rows")
    models, rows = told["models"], told["rows"]
    if not isinstance(models, dict) or not all(isinstance(shape, dict) for shape in models.values()):
        raise KvarnError(f"{path}: models must be an object with an object for each model")
    if not isinstance(rows, list):
        raise KvarnError(f"{path}: rows must be a list")
    for i, row in enumerate(rows):
        wrong = _wrong_field(row)
        if wrong is not None:
            raise KvarnError(f"{path}: row {i}: {wrong}")
    return told


def _wrong_field(row: object) -> str | None:
    if not isinstance(row, dict):
        return "it is not an object"
    for name, kind in FIELDS.items():
        value = row.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"{name} is missing or of a wrong type"
    return None if row["tok_s"] > 0 else "tok_s must be above 0"
