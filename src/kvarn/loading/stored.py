"""The models on this machine: those in kvarn's own folder and in the Hugging Face cache; listing and removing them.

A model is one .gguf file, or one folder with config.json and safetensors files. Its name is what the user
types to run it. Removing never follows a link out of the two folders: of a link only the link goes.
Non-goals: downloading (pull.py); whether kvarn can run the model (checkpoint.py tells).
"""

import importlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvarn.errors import BadModel, KvarnError, PullFailed, printable
from kvarn.loading.catalogue import MODELS, HubModel, WheelModel, near, quantization
from kvarn.loading.gguf import general_keys
from kvarn.loading.pull import models_folder, stamp_of
from kvarn.words import one_of


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
        with suppress(BadModel, OSError, ValueError, LookupError, TypeError):
            if self.path.is_dir():
                found = json.loads((self.path / "config.json").read_text(encoding="utf-8"))["model_type"]
            else:
                found = general_keys(self.path).get("general.architecture")
            return printable(found, 40) if isinstance(found, str) else None
        return None

    @property
    def quantization(self) -> str | None:
        return None if self.path.is_dir() else quantization(self.path.name)


def stored_models() -> list[Stored]:
    """By name."""
    return sorted((*_own(), *_of_hub()), key=lambda model: model.name)


def find(names: Sequence[str], models: Sequence[Stored]) -> list[Stored]:
    """The models of these names or paths, each once."""
    found: dict[str, Stored] = {}
    for name in names:
        match = [each for each in models if name in (each.name, str(each.path))]
        if not match:
            meant = near(name, [each.name for each in models])
            hint = f"did you mean {one_of(meant)}?" if meant else "`kvarn list` shows what is here"
            raise PullFailed(f"{name} is not on this machine; {hint}")
        found[match[0].name] = match[0]
    return list(found.values())


def remove(chosen: Sequence[Stored], models: Sequence[Stored]) -> int:
    """Remove models; `models` are all that are here. Returns the bytes that were freed."""
    plans: list[Callable[[], int]] = [partial(_remove_own, each) for each in chosen if each.repo is None]
    for repo in dict.fromkeys(each.repo for each in chosen if each.repo is not None):
        gone = [each for each in chosen if each.repo == repo]
        plans.append(_plan_of_hub(repo, gone, [each for each in models if each.repo == repo and each not in gone]))
    try:
        return sum(apply() for apply in plans)
    except OSError as e:
        raise KvarnError(f"{e.filename or 'the model'} cannot be removed: {e.strerror or e}") from None


def _own() -> Iterable[Stored]:
    names = {model.file: name for name, model in MODELS.items() if isinstance(model, WheelModel)}
    with suppress(OSError):
        for path in models_folder().iterdir():
            whole = path.suffix == ".gguf" and path.is_file()
            if not path.name.startswith(".") and (whole or (path / "config.json").is_file()):
                yield Stored(names.get(path.name, str(path)), path, _bytes(path), path.stat().st_mtime)


def _bytes(path: Path) -> int:
    """What removing it frees: a link is not followed."""
    if path.is_symlink():
        return 0
    if path.is_dir():
        return sum(each.lstat().st_size for each in path.rglob("*") if each.is_file() and not each.is_symlink())
    return path.stat().st_size


def _remove_own(model: Stored) -> int:
    freed = _bytes(model.path)
    if model.path.is_symlink() or not model.path.is_dir():
        model.path.unlink()
        stamp_of(model.path).unlink(missing_ok=True)
    else:
        shutil.rmtree(model.path)
    return freed


def _scan() -> Any:
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
    scan = _scan()
    names = {(each.repo, each.file): name for name, each in MODELS.items() if isinstance(each, HubModel)}
    for repo in () if scan is None else scan.repos:
        for file, (path, parts) in _models_of(repo).items() if repo.repo_type == "model" else ():
            sizes = {each.blob_path: each.size_on_disk for each in parts}
            name = names.get((repo.repo_id, file)) or f"hf:{repo.repo_id}{'/' if file else ''}{file}"
            modified = max(each.blob_last_modified for each in parts)
            yield Stored(name, path, sum(sizes.values()), modified, repo.repo_id, file)


def _models_of(repo: Any) -> dict[str, tuple[Path, list[Any]]]:
    """Its .gguf files, and "" for a folder of safetensors: the newest place, and all stored files of it."""
    found: dict[str, tuple[Path, list[Any]]] = {}
    for revision in sorted(repo.revisions, key=lambda revision: revision.last_modified):
        inside = {str(each.file_path.relative_to(revision.snapshot_path)): each for each in revision.files}
        models = {file: [each] for file, each in inside.items() if file.endswith(".gguf")}
        if "config.json" in inside and any(file.endswith(".safetensors") for file in inside):
            models[""] = list(inside.values())
        for file, parts in models.items():
            earlier = found[file][1] if file in found else []
            found[file] = (revision.snapshot_path / file, earlier + parts)
    return found


def _plan_of_hub(repo: str, gone: Sequence[Stored], kept: Sequence[Stored]) -> Callable[[], int]:
    """What removes these models of a repository, in which others are kept."""
    scan = _scan()
    cached = next(each for each in scan.repos if each.repo_id == repo and each.repo_type == "model")
    if not kept:
        # Only this repository: a copy of it has revisions of the same hash.
        alone = replace(scan, repos=frozenset({cached}))
        return partial(_execute, alone.delete_revisions(*(revision.commit_hash for revision in cached.revisions)))
    places = {each.file_path: each for revision in cached.revisions for each in revision.files}
    files = {revision.snapshot_path / model.file for revision in cached.revisions for model in gone}
    wanted = [each for path, each in places.items() if path in files]
    if any(not model.file for model in gone) or any(each.blob_path.is_symlink() for each in wanted):
        together = " ".join(model.name for model in (*gone, *kept))
        raise KvarnError(
            f"{gone[0].name} shares its storage with {kept[0].name}; remove them together: kvarn rm {together}"
        )
    others = {each.blob_path for each in places.values() if each not in wanted}
    return partial(_remove_files, wanted, others, cached.repo_path.resolve())


def _execute(strategy: Any) -> int:
    strategy.execute()
    return int(strategy.expected_freed_size)


def _remove_files(wanted: Sequence[Any], others: set[Path], inside: Path) -> int:
    """Remove the links and the contents that no other link has, and nothing outside of the repository's folder."""
    freed = 0
    for each in wanted:
        each.file_path.unlink(missing_ok=True)
        blob = each.blob_path
        if blob.exists() and blob not in others and blob.resolve().is_relative_to(inside):
            freed += blob.stat().st_size
            blob.unlink()
    return freed
