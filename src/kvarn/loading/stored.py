"""The models on this machine: those in kvarn's own folder and in the cache of the Hugging Face library.

A model is one .gguf file, or one folder with config.json and safetensors files. Its name is the shortest
that the user can type to run it. What cannot be read is left out, and does not hide other models.
Non-goals: removing (removal.py); downloading (pull.py); whether kvarn can run the model (checkpoint.py tells).
"""

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarn.errors import BadModel, PullFailed, printable
from kvarn.loading.catalogue import MODELS, HubModel, WheelModel, has_weights, near, quantization
from kvarn.loading.gguf import general_keys
from kvarn.loading.hub_offer import of_folder
from kvarn.loading.names import hub_name, meaning, own_models, short_name
from kvarn.loading.paths import models_folder
from kvarn.words import one_of

_MOST_CONFIG = 16 << 20  # bytes of a config.json


@dataclass(frozen=True, slots=True)
class Stored:
    name: str
    path: Path
    bytes: int
    modified: float  # seconds since 1970
    repo: str | None = None  # on the hub; None: in kvarn's own folder
    file: str = ""  # in the repository; empty: all of it

    @property
    def family(self) -> str | None:
        """The architecture, as the file says it."""
        with suppress(BadModel, OSError, ValueError, LookupError, TypeError, RecursionError):
            if self.path.is_dir():
                found = _config(self.path / "config.json")["model_type"]
            else:
                found = general_keys(self.path).get("general.architecture")
            return printable(found, 40) if isinstance(found, str) else None
        return None

    @property
    def quantization(self) -> str | None:
        return None if self.path.is_dir() else quantization(self.path.name)


def _config(path: Path) -> Any:
    with path.open("rb") as file:
        content = file.read(_MOST_CONFIG + 1)
    return json.loads(content) if len(content) <= _MOST_CONFIG else {}


def stored_models() -> list[Stored]:
    """By name."""
    return sorted((*_own(), *_of_hub()), key=lambda model: model.name)


def find(names: Sequence[str], models: Sequence[Stored]) -> list[Stored]:
    """The models of these names or paths, each once."""
    found: dict[Path, Stored] = {}
    for name in names:
        match = [each for each in models if name in (each.name, str(each.path))] or _meant(name, models)
        if not match:
            meant = near(name, [each.name for each in models])
            hint = f"did you mean {one_of(meant)}?" if meant else "`kvarn list` shows what is here"
            raise PullFailed(f"{name} is not on this machine; {hint}")
        if len(match) > 1:
            raise PullFailed(f"{name} can be {one_of([each.name for each in match])}; choose one")
        found[match[0].path] = match[0]
    return list(found.values())


def _meant(name: str, models: Sequence[Stored]) -> list[Stored]:
    """The models for a name in any form that other commands take."""
    try:
        target = meaning(name).model
    except PullFailed:
        return []
    if isinstance(target, HubModel):
        same = [each for each in models if each.repo == target.repo]
        if target.weights:
            return [each for each in same if has_weights(each.file, target.weights)]
        return [each for each in same if each.file == target.file]
    path = models_folder() / target.file if isinstance(target, WheelModel) else target
    return [each for each in models if each.path == path.absolute() or each.path == path]


def _own() -> Iterable[Stored]:
    names = {model.file: name for name, model in MODELS.items() if isinstance(model, WheelModel)}
    for path in own_models():
        with suppress(OSError):
            name = names.get(path.name) or short_name(path)
            yield Stored(name, path, bytes_of(path), path.stat().st_mtime)


def bytes_of(path: Path) -> int:
    """What removing it frees: a link is not followed."""
    if path.is_symlink():
        return 0
    if path.is_dir():
        return sum(each.lstat().st_size for each in path.rglob("*") if each.is_file() and not each.is_symlink())
    return path.stat().st_size


def scan() -> Any:
    """The library's view of its cache; None if there is none."""
    try:
        hub, errors = importlib.import_module("huggingface_hub"), importlib.import_module("huggingface_hub.errors")
    except ImportError:
        return None
    try:
        return hub.scan_cache_dir()
    except (errors.CacheNotFound, ValueError, OSError):
        return None


def _of_hub() -> Iterable[Stored]:
    cache = scan()
    names = {(each.repo, each.file): name for name, each in MODELS.items() if isinstance(each, HubModel)}
    for repo in () if cache is None else cache.repos:
        models = models_of(repo) if repo.repo_type == "model" else {}
        for file, (path, parts) in models.items():
            sizes = {each.blob_path: each.size_on_disk for each in parts}
            name = names.get((repo.repo_id, file)) or _short_reference(repo.repo_id, file, models)
            modified = max(each.blob_last_modified for each in parts)
            yield Stored(name, path, sum(sizes.values()), modified, repo.repo_id, file)


def _short_reference(repo: str, file: str, models: Mapping[str, object]) -> str:
    """hf:org/repo:Q4_K_M if that is only this file here, otherwise with the file."""
    weights = quantization(file) or ""
    if weights and sum(has_weights(each, weights) for each in models) == 1:
        return hub_name(HubModel(repo, "", weights))
    return hub_name(HubModel(repo, file))


def models_of(repo: Any) -> dict[str, tuple[Path, list[Any]]]:
    """Its .gguf files, and "" for a folder of safetensors: the newest place, and all stored files of it."""
    found: dict[str, tuple[Path, list[Any]]] = {}
    for revision in sorted(repo.revisions, key=lambda revision: revision.last_modified):
        inside = {str(each.file_path.relative_to(revision.snapshot_path)): each for each in revision.files}
        models = {file: [each] for file, each in inside.items() if file.endswith(".gguf")}
        if "config.json" in inside and any(file.endswith(".safetensors") for file in inside):
            models[""] = [each for file, each in inside.items() if of_folder(file)]
        for file, parts in models.items():
            earlier = found[file][1] if file in found else []
            found[file] = (revision.snapshot_path / file, earlier + parts)
    return found
