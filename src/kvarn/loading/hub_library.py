"""The huggingface_hub library as kvarn uses it: imported late, quiet, with kvarn's progress and one-line errors.

Non-goals: what is downloaded (hub.py); what the hub says about it (hub_offer.py).
"""

import importlib
import inspect
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvarn.errors import PullFailed, printable
from kvarn.loading.progress import Progress


def library(name: str) -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise PullFailed(f"{name} needs the package huggingface_hub: pip install huggingface_hub") from None


def hub_hosts() -> set[str]:
    """The hosts of the hub: the library's own, and the one that HF_ENDPOINT sets."""
    try:
        constants = importlib.import_module("huggingface_hub.constants")
    except ImportError:
        return set()
    addresses = (getattr(constants, name, "") for name in ("ENDPOINT", "_HF_DEFAULT_ENDPOINT"))
    return {host for address in addresses if (host := urlsplit(address).hostname)}


@contextmanager
def quiet_library(hub: Any) -> Iterator[None]:
    """Without the library's own remarks on standard error, such as on retries."""
    before = hub.logging.get_verbosity()
    hub.logging.set_verbosity_error()
    try:
        yield
    finally:
        hub.logging.set_verbosity(before)


def snapshot_of(repo: str) -> Path | None:
    """The folder of the main revision in the library's cache, if there is one. It need not be complete."""
    constants = importlib.import_module("huggingface_hub.constants")
    root = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    try:
        folder = root / "snapshots" / (root / "refs" / "main").read_text(encoding="utf-8").strip()
        return folder if folder.is_dir() and folder.parent.name == "snapshots" else None
    except (OSError, ValueError):
        return None


def bar(download: Callable[..., Any], name: str, size: int, progress: Progress) -> dict[str, Any]:
    """The argument that makes the library report to `progress`, if this version of the library has it.

    The library can have several bars for the same bytes (received, written); the one that leads is shown.
    """
    total = size or None
    progress(f"fetching {name}", 0, total)
    if "tqdm_class" not in inspect.signature(download).parameters:
        return {}
    base: Any = importlib.import_module("tqdm.auto").tqdm
    most = 0

    class Bar(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.done = kwargs.get("initial") or 0
            kwargs.pop("name", None)
            super().__init__(*args, **(kwargs | {"file": io.StringIO()}))

        def update(self, n: float | None = 1) -> Any:
            nonlocal most
            self.done += n or 0
            if self.unit == "B":  # another bar counts files
                most = max(most, int(min(self.done, total or self.done)))
                progress(f"fetching {name}", most, total)
            return super().update(n)

    return {"tqdm_class": Bar}


REASONS = {  # the library's errors, special ones first
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set",
    "GatedRepoError": "its owner asks for a login",
    "RepositoryNotFoundError": "the hub has no such repository, or hides it",
    "LocalEntryNotFoundError": "the hub cannot be reached",
    "EntryNotFoundError": "the repository has no such file",
}


def reason(error: Exception) -> str:
    errors = importlib.import_module("huggingface_hub.errors")
    for name, text in REASONS.items():
        kind = getattr(errors, name, None)
        if kind is not None and isinstance(error, kind):
            return text
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0], 200)


def remedy(error: Exception) -> str:
    if type(error).__name__ == "GatedRepoError":
        return "accept its terms on the hub's page and set HF_TOKEN, or choose another model"
    return "check the name, go online, or give a path"
