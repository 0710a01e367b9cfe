"""Models on the Hugging Face hub: downloads, and the check of what arrived.

The huggingface_hub library downloads into its own cache folder (HF_HOME), resumes what was interrupted,
and respects HF_ENDPOINT and HF_TOKEN. It gives a file its name before the SHA-256 is checked, so a file in
the cache is used only if a stamp says that it was checked. Without a stamp it is checked first: the library
names the stored content of a large file after its SHA-256, so this needs no question to the hub.
Non-goals: uploads, revisions other than the main one, searching.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvarn.errors import PullFailed
from kvarn.loading import stamps
from kvarn.loading.catalogue import HubModel, has_weights, quantization
from kvarn.loading.digest import copy
from kvarn.loading.hub_library import bar, library, quiet_library, reason, remedy, snapshot_of
from kvarn.loading.hub_offer import FOLDER_FILES, Wanted, of_folder, one_file, wanted
from kvarn.loading.progress import Progress
from kvarn.words import counted, file_size

Announce = Callable[[str], None]
_SHA256 = re.compile(r"[0-9a-f]{64}")


def fetch(model: HubModel, name: str, progress: Progress, announce: Announce) -> Path:
    """Where the file or the folder is, downloaded first if it is not on this machine. `name` is for messages."""
    hub = library(name)
    try:
        if stored := _stored(model, name, progress):
            return stored
        with quiet_library(hub):
            return _download(hub, model, name, progress, announce)
    except PullFailed:
        raise
    except Exception as e:  # noqa: BLE001 (the library's errors have no other common base across versions)
        raise PullFailed(f"{name} could not be fetched ({reason(e)}); {remedy(e)}") from None


def located(model: HubModel) -> tuple[HubModel, Path] | None:
    """Where a model is in the cache, and its file there. It need be neither complete nor right."""
    folder = snapshot_of(model.repo)
    if folder is None:
        return None
    if model.weights:
        files = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
        if not any(has_weights(file, model.weights) for file in files):
            return None
        model = one_file(model, files)
    return (model, folder) if (folder / model.file).exists() else None


def _stored(model: HubModel, name: str, progress: Progress) -> Path | None:
    """What is in the cache, and was checked or is checked now. Nothing is asked of the hub."""
    found = located(model)
    if found is None:
        return None
    model, folder = found
    path = folder / model.file
    if stamps.read(stamps.of_hub(path), folder) is not None:
        return path
    expected = _stored_digest(path) if model.file else None
    if expected is None:
        return None
    if _digest(path, name, progress) != expected:
        _remove(path)
        return None
    stamps.write(stamps.of_hub(path), folder, {model.file: expected})
    return path


def _download(hub: Any, model: HubModel, name: str, progress: Progress, announce: Announce) -> Path:
    try:
        offer = wanted(hub, model)
    except Exception:
        folder = None if model.file or model.weights else snapshot_of(model.repo)
        if folder is None or not any(folder.glob("*.safetensors")):
            raise
        return _unasked(folder, name, progress)  # the hub cannot be reached, and the folder was downloaded before
    model = offer.model
    kind = quantization(model.file) if model.file else counted(len(offer.files), "file")
    announce(", ".join(part for part in (model.repo, kind, file_size(offer.size), offer.licence) if part))
    if model.file:
        options = bar(hub.hf_hub_download, name, offer.size, progress)
        path = Path(hub.hf_hub_download(model.repo, model.file, **options))
        folder = path.parents[model.file.count("/")]
    else:
        options = bar(hub.snapshot_download, name, offer.size, progress)
        path = folder = Path(hub.snapshot_download(model.repo, allow_patterns=FOLDER_FILES, **options))
    _check(folder, offer, name, progress)
    stamps.write(stamps.of_hub(path), folder, {file: offer.sha256.get(file, "") for file in offer.files})
    return path


def _check(folder: Path, offer: Wanted, name: str, progress: Progress) -> None:
    for file, expected in offer.sha256.items():
        shown = name if offer.model.file else f"{name}/{file}"
        digest = _digest(folder / file, shown, progress)
        if digest != expected:
            _remove(folder / file)
            raise PullFailed(f"{shown} arrived with SHA-256 {digest}, not {expected}, and was removed; try again")


def _unasked(folder: Path, name: str, progress: Progress) -> Path:
    """A folder that is used without the hub. Its large files are checked against the names of their contents."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and of_folder(str(path.relative_to(folder))))
    digests = {str(path.relative_to(folder)): _stored_digest(path) or "" for path in files}
    for file, expected in digests.items():
        if expected and _digest(folder / file, f"{name}/{file}", progress) != expected:
            _remove(folder / file)
            raise PullFailed(f"{name}/{file} is damaged and was removed; go online and try again")
    # No stamp: only the hub knows whether files are missing.
    return folder


def _digest(path: Path, name: str, progress: Progress) -> str:
    with path.open("rb") as file:
        return copy(file, None, f"checking {name}", path.stat().st_size, progress)


def _stored_digest(path: Path) -> str | None:
    """The SHA-256 that the library wrote down: the name of the stored content, to which the file is a link."""
    with suppress(OSError):
        name = Path(os.readlink(path)).name
        return name if _SHA256.fullmatch(name) else None
    return None


def _remove(path: Path) -> None:
    """A damaged file: its link, and its content if that is in the library's cache."""
    repository = next((each for each in path.parents if each.name.startswith("models--")), path.parent)
    content = path.resolve()
    path.unlink()
    if content.is_relative_to(repository.parent.resolve()):
        content.unlink(missing_ok=True)
