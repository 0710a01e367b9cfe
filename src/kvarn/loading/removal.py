"""Removes models from this machine, and only them.

Of a repository in the cache of the Hugging Face library, other large files stay, also those that are no
models for kvarn. Removing never follows a link out of the two folders: of a link only the link goes.
Non-goals: what is here (stored.py).
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvarn.errors import KvarnError
from kvarn.loading import stamps, stored
from kvarn.loading.stored import Stored, bytes_of, models_of

_LARGE = 1 << 20  # bytes: smaller files of a repository go with its last model


def remove(chosen: Sequence[Stored], models: Sequence[Stored]) -> int:
    """Remove models; `models` are all that are here. Returns the bytes that were freed."""
    plans: list[Callable[[], int]] = [partial(_remove_own, each) for each in chosen if each.repo is None]
    for repo in dict.fromkeys(each.repo for each in chosen if each.repo is not None):
        gone = [each for each in chosen if each.repo == repo]
        plans.append(_plan_of_hub(repo, gone, [each for each in models if each.repo == repo and each not in gone]))
    try:
        freed = sum(apply() for apply in plans)
        for each in chosen:
            stamps.of_hub(each.path).unlink(missing_ok=True)
        return freed
    except OSError as e:
        raise KvarnError(f"{e.filename or 'the model'} cannot be removed: {e.strerror or e}") from None


def _remove_own(model: Stored) -> int:
    freed = bytes_of(model.path)
    if model.path.is_symlink() or not model.path.is_dir():
        model.path.unlink()
        stamps.beside(model.path).unlink(missing_ok=True)
    else:
        shutil.rmtree(model.path)
    return freed


def _plan_of_hub(repo: str, gone: Sequence[Stored], left: Sequence[Stored]) -> Callable[[], int]:
    """What removes these models of a repository, in which others are left."""
    scan = stored.scan()
    cached = next((each for each in scan.repos if each.repo_id == repo and each.repo_type == "model"), None)
    if cached is None:
        raise KvarnError(f"{repo} is not in the cache any more; `kvarn list` shows what is here")
    found = models_of(cached)
    wanted = {each.file_path: each for model in gone for each in found.get(model.file, (None, []))[1]}
    kept = {
        each.file_path: each for revision in cached.revisions for each in revision.files if each.file_path not in wanted
    }
    if not left and not any(each.size_on_disk >= _LARGE for each in kept.values()):
        # Only this repository: a copy of it has revisions of the same hash.
        alone = replace(scan, repos=frozenset({cached}))
        return partial(_execute, alone.delete_revisions(*(revision.commit_hash for revision in cached.revisions)))
    if any(each.blob_path.is_symlink() for each in wanted.values()):
        raise _shared(repo, gone, left)
    others = {each.blob_path for each in kept.values()}
    return partial(_remove_files, list(wanted.values()), others, cached.repo_path.resolve())


def _shared(repo: str, gone: Sequence[Stored], left: Sequence[Stored]) -> KvarnError:
    """The library can store a file once for several repositories; only it knows who else uses it."""
    name = gone[0].name
    if not left:
        return KvarnError(f"{name} shares its storage with other files; to remove all: hf cache rm model/{repo}")
    together = " ".join(model.name for model in (*gone, *left))
    return KvarnError(f"{name} shares its storage with {left[0].name}; remove them together: kvarn rm {together}")


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
