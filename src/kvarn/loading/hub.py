"""Models on the Hugging Face hub: what the hub says about a file, downloads, and the check of what arrived.

The huggingface_hub library downloads into its own cache folder (HF_HOME), resumes what was interrupted,
and respects HF_ENDPOINT and HF_TOKEN. A file that is in that folder is used as it is, without a question
to the hub. The SHA-256 of a downloaded file is compared with the hub's.
Non-goals: uploads, revisions other than the main one, searching.
"""

import importlib
import inspect
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kvarn.errors import PullFailed, printable
from kvarn.loading.catalogue import HubModel, quantization
from kvarn.loading.progress import Progress
from kvarn.loading.wheels import copy
from kvarn.words import counted, file_size

FOLDER_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model"]
Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the hub says about the files of a model."""

    size: int
    sha256: dict[str, str]  # by file; only of large files
    licence: str | None
    n_files: int


def parse(name: str) -> HubModel:
    """`hf:org/repo/file.gguf`, or `hf:org/repo` for the folder (its `file` is empty)."""
    parts = name.removeprefix("hf:").split("/")
    if len(parts) < 2 or not all(parts) or ".." in parts:
        raise PullFailed(f"{name} names no model; write hf:org/repo or hf:org/repo/file.gguf")
    return HubModel("/".join(parts[:2]), "/".join(parts[2:]))


def fetch(model: HubModel, name: str, progress: Progress, announce: Announce) -> Path:
    """Where the file or the folder is, downloaded first if it is not on this machine. `name` is what the user gave."""
    hub = _library(name)
    try:
        stored = hub.try_to_load_from_cache(model.repo, model.file) if model.file else None
        if isinstance(stored, str) and Path(stored).exists():
            return Path(stored)
        with _quiet(hub):
            return _download(hub, model, name, progress, announce)
    except PullFailed:
        raise
    except Exception as e:  # noqa: BLE001 (the library's errors have no other common base across versions)
        raise PullFailed(f"{name} could not be fetched ({_reason(e)}); {_remedy(e)}") from None


def _library(name: str) -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise PullFailed(f"{name} needs the package huggingface_hub: pip install huggingface_hub") from None


@contextmanager
def _quiet(hub: Any) -> Iterator[None]:
    """Without the library's own remarks on standard error, such as on retries."""
    before = hub.logging.get_verbosity()
    hub.logging.set_verbosity_error()
    try:
        yield
    finally:
        hub.logging.set_verbosity(before)


def _download(hub: Any, model: HubModel, name: str, progress: Progress, announce: Announce) -> Path:
    try:
        wanted = _wanted(hub, model)
    except Exception:
        stored = None if model.file else _stored_folder(hub, model)
        if stored is None:
            raise
        return stored  # the hub cannot be reached, and the folder was downloaded before
    kind = quantization(model.file) if model.file else counted(wanted.n_files, "file")
    announce(", ".join(part for part in (model.repo, kind, file_size(wanted.size), wanted.licence) if part))
    if model.file:
        path = Path(hub.hf_hub_download(model.repo, model.file, **_bar(hub.hf_hub_download, name, progress)))
        _check(path, wanted.sha256.get(model.file), name, progress)
        return path
    options = _bar(hub.snapshot_download, name, progress)
    folder = Path(hub.snapshot_download(model.repo, allow_patterns=FOLDER_FILES, **options))
    for file, expected in wanted.sha256.items():
        _check(folder / file, expected, f"{name}/{file}", progress)
    return folder


def _stored_folder(hub: Any, model: HubModel) -> Path | None:
    try:
        return Path(hub.snapshot_download(model.repo, allow_patterns=FOLDER_FILES, local_files_only=True))
    except Exception:  # noqa: BLE001 (see fetch)
        return None


def _wanted(hub: Any, model: HubModel) -> Wanted:
    info = hub.HfApi().model_info(model.repo, files_metadata=True)
    files = {each.rfilename: each for each in info.siblings or ()}
    if model.file and model.file not in files:
        others = [file for file in files if file.endswith(".gguf")]
        hint = f"it has {', '.join(others[:8])}" if others else "it has no .gguf file"
        raise PullFailed(f"{model.repo} on the hub has no file {model.file}; {printable(hint)}")
    patterns = [model.file] if model.file else FOLDER_FILES
    chosen = {file: each for file, each in files.items() if any(fnmatchcase(file, pattern) for pattern in patterns)}
    digests = {file: _sha256(each.lfs) for file, each in chosen.items()}
    return Wanted(
        size=sum(each.size or 0 for each in chosen.values()),
        sha256={file: digest for file, digest in digests.items() if digest},
        licence=_licence(info),
        n_files=len(chosen),
    )


def _sha256(lfs: Any) -> str | None:
    return lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)


def _check(path: Path, expected: str | None, name: str, progress: Progress) -> None:
    if expected is None:
        return
    with path.open("rb") as file:
        digest = copy(file, None, f"checking {name}", path.stat().st_size, progress)
    if digest != expected:
        blob = path.resolve()
        path.unlink()
        blob.unlink(missing_ok=True)
        raise PullFailed(f"{name} arrived with SHA-256 {digest}, not {expected}, and was removed; try again")


def _licence(info: Any) -> str | None:
    """Of the model card; some cards give a name of their own instead of a known licence."""
    card = info.card_data
    values = [] if card is None else [getattr(card, "license_name", None), getattr(card, "license", None)]
    tags = [tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")]
    return next((printable(str(value), 60) for value in (*values, *tags) if value), None)


def _bar(download: Callable[..., Any], name: str, progress: Progress) -> dict[str, Any]:
    """The argument that makes the library report to `progress`, if this version of the library has it."""
    progress(f"fetching {name}", 0, None)
    if "tqdm_class" not in inspect.signature(download).parameters:
        return {}
    base: Any = importlib.import_module("tqdm.auto").tqdm

    class Bar(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.done = kwargs.get("initial") or 0
            kwargs.pop("name", None)
            super().__init__(*args, **(kwargs | {"file": io.StringIO()}))

        def update(self, n: float | None = 1) -> Any:
            self.done += n or 0
            if self.unit == "B":  # another bar counts files
                progress(f"fetching {name}", int(self.done), int(self.total) if self.total else None)
            return super().update(n)

    return {"tqdm_class": Bar}


REASONS = {  # the library's errors, special ones first
    "GatedRepoError": "its owner asks for a login",
    "RepositoryNotFoundError": "the hub has no such repository, or hides it",
    "LocalEntryNotFoundError": "the hub cannot be reached",
    "EntryNotFoundError": "the repository has no such file",
}


def _reason(error: Exception) -> str:
    errors = importlib.import_module("huggingface_hub.errors")
    for name, reason in REASONS.items():
        kind = getattr(errors, name, None)
        if kind is not None and isinstance(error, kind):
            return reason
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0], 200)


def _remedy(error: Exception) -> str:
    if type(error).__name__ == "GatedRepoError":
        return "accept its terms on the hub's page and set HF_TOKEN, or choose another model"
    return "check the name, go online, or give a path"
