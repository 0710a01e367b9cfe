"""What a user means with the name of a model: a path, a name of the catalogue, or files on the hub.

The order is: an existing path; an address or reference of the hub; a name of the catalogue; a file in
kvarn's own folder by its short name; a family; org/repo. Nothing is downloaded and no network is used.
Non-goals: finding or fetching the files (pull.py).
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvarn.errors import PullFailed, printable
from kvarn.loading.catalogue import DEFAULTS, MODELS, HubModel, Model, near
from kvarn.loading.hub_library import hub_hosts
from kvarn.loading.paths import models_folder, user_path
from kvarn.words import one_of

FORMS = "a .gguf file, a folder with config.json, hf:org/repo, hf:org/repo:Q4_K_M or hf:org/repo/file.gguf"
_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?([\w-]+(?:\.[\w-]+)+)/", re.IGNORECASE | re.ASCII)
_BARE = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?::[\w.-]+)?", re.ASCII)  # org/repo, or org/repo:Q4_K_M
_IN_ADDRESSES = (["blob", "main"], ["resolve", "main"], ["tree", "main"])  # org/repo/blob/main/file


@dataclass(frozen=True, slots=True)
class Meant:
    model: Path | Model
    name: str  # in full
    note: str = ""  # what the user should know; empty: the name was clear


def meaning(text: str) -> Meant:
    if not text.strip():
        raise PullFailed(f"the name of the model is empty; give {FORMS}")
    path = user_path(text)
    if _exists(path):
        return Meant(path, text)
    if reference(text) is not None:
        model = hub_model(text)
        return Meant(model, hub_name(model))
    low = text.lower().removesuffix(":latest")
    if low in MODELS:
        return Meant(MODELS[low], low)
    if own := _own(text):
        return Meant(own, text)
    if low in DEFAULTS and DEFAULTS[low] in MODELS:
        return Meant(MODELS[DEFAULTS[low]], DEFAULTS[low], f"{text} is short for {DEFAULTS[low]}")
    if is_repository(text):
        return Meant(hub_model(text), f"hf:{text}", f"there is no file or folder {text}; taking hf:{text}")
    if path.suffix == ".gguf" or "/" in text:
        raise PullFailed(f"{printable(text, 200)}: no such file or folder; check the path")
    raise unknown(text)


def is_known(word: str) -> bool:
    """Whether a word is the name of a model, without a look at other files than kvarn's own."""
    low = word.lower().removesuffix(":latest")
    return low in MODELS or low in DEFAULTS or reference(word) is not None or (word != "" and _own(word) is not None)


def is_repository(word: str) -> bool:
    """Whether a word has the form org/repo."""
    return _BARE.fullmatch(word) is not None and not word.endswith(".gguf")


def unknown(name: str) -> PullFailed:
    """The error for a name that is not in the catalogue, with the names that may have been meant."""
    shown, meant = printable(repr(name), 80), near(name, MODELS)
    if meant:
        return PullFailed(f"there is no model {shown}; did you mean {one_of(meant)}?")
    return PullFailed(f"there is no model {shown}; `kvarn list --all` shows the names; otherwise give {FORMS}")


def hub_model(text: str) -> HubModel:
    """`org/repo/file.gguf`, `org/repo:Q4_K_M`, or `org/repo` for the folder, with any prefix of the hub."""
    rest = reference(text) or text
    if "://" in text:
        rest = rest.split("?")[0].split("#")[0].rstrip("/")
    parts = rest.split("/")
    if parts[2:4] in _IN_ADDRESSES:
        del parts[2:4]
    weights = ""
    if len(parts) == 2:
        parts[1], _, weights = parts[1].partition(":")
    if len(parts) < 2 or not all(parts) or ".." in parts:
        forms = "hf:org/repo, hf:org/repo:Q4_K_M or hf:org/repo/file.gguf"
        raise PullFailed(f"{printable(text, 200)} names no model; write {forms}")
    return HubModel("/".join(parts[:2]), "/".join(parts[2:]), "" if weights == "latest" else weights.upper())


def reference(text: str) -> str | None:
    """What follows `hf:` or the hub's address; None if the text begins with neither."""
    if text[:3].lower() == "hf:":
        return text[3:].removeprefix("//")
    address = _ADDRESS.match(text)
    if address is None:
        return None
    host = address[1].lower()
    short = host.startswith("hf.") and host.count(".") == 1  # the hub's short address
    return text[address.end() :] if short or host in hub_hosts() else None


def hub_name(model: HubModel) -> str:
    """The reference in full."""
    return f"hf:{model.repo}{'/' if model.file else ''}{model.file}{':' if model.weights else ''}{model.weights}"


def own_models() -> Iterator[Path]:
    """The .gguf files and folders with config.json in kvarn's own folder. What cannot be read is left out."""
    entries: list[Path] = []
    with suppress(OSError):
        entries = sorted(models_folder().iterdir())
    for path in entries:
        with suppress(OSError):
            whole = path.suffix == ".gguf" and path.is_file()
            if not path.name.startswith(".") and (whole or (path / "config.json").is_file()):
                yield path


def short_name(path: Path) -> str:
    """The shortest name that means this file or folder of kvarn's own folder."""
    for name in (path.name.removesuffix(".gguf"), path.name):
        with suppress(PullFailed):
            if meaning(name).model == path:
                return name
    return str(path)


def _own(text: str) -> Path | None:
    found = list(own_models())
    for name in (text, f"{text}.gguf"):
        same = [path for path in found if path.name == name]
        same = same or [path for path in found if path.name.lower() == name.lower()]
        if len(same) > 1:
            listed = one_of([printable(path.name, 80) for path in same])
            raise PullFailed(f"{printable(text, 80)} can be {listed}; write it with the same capital letters")
        if same:
            return same[0]
    return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as e:  # a name that is too long, a folder that may not be read
        shown = printable(str(path), 200)
        raise PullFailed(f"{shown} cannot be read: {e.strerror or e}; check the path and its permissions") from None
