"""What the Hugging Face hub says about the files of a model: which there are, sizes, digests, the licence.

Non-goals: downloading (hub.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from kvarn.errors import PullFailed, printable
from kvarn.loading.catalogue import HubModel, has_weights, quantization

FOLDER_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model"]
_MOST_NAMED = 8  # files in an error message


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the hub says about the files of a model."""

    model: HubModel  # with its file
    size: int
    sha256: dict[str, str]  # by file; only of large files
    licence: str | None
    files: tuple[str, ...]


def of_folder(file: str) -> bool:
    """Whether a file belongs to a model that is a folder."""
    return any(fnmatchcase(file, pattern) for pattern in FOLDER_FILES)


def wanted(hub: Any, model: HubModel) -> Wanted:
    """Asks the hub."""
    info = hub.HfApi().model_info(model.repo, files_metadata=True)
    files = {each.rfilename: each for each in info.siblings or ()}
    model = one_file(model, files) if model.weights else model
    if model.file and model.file not in files:
        raise PullFailed(f"{model.repo} on the hub has no file {printable(model.file, 200)}; {_named(files)}")
    chosen = {file: each for file, each in files.items() if (file == model.file if model.file else of_folder(file))}
    if not model.file and not any(file.endswith(".safetensors") for file in chosen):
        raise PullFailed(f"{model.repo} on the hub has no safetensors files; {_choices(model.repo, files)}")
    digests = {file: _sha256(each.lfs) for file, each in chosen.items()}
    return Wanted(
        model=model,
        size=sum(each.size or 0 for each in chosen.values()),
        sha256={file: digest for file, digest in digests.items() if digest},
        licence=_licence(info),
        files=tuple(chosen),
    )


def one_file(model: HubModel, files: Iterable[str]) -> HubModel:
    """The model with its file: the only one that has its `weights`."""
    files = list(files)
    found = [file for file in files if has_weights(file, model.weights)]
    if len(found) == 1:
        return replace(model, file=found[0], weights="")
    weights = printable(model.weights, 40)
    if found:
        ways = ", ".join(f"hf:{model.repo}/{file}" for file in found[:_MOST_NAMED])
        raise PullFailed(f"{model.repo} has {len(found)} files with {weights}; choose one: {printable(ways)}")
    raise PullFailed(f"{model.repo} on the hub has no single .gguf file with {weights}; {_choices(model.repo, files)}")


def _named(files: Iterable[str]) -> str:
    others = [file for file in files if file.endswith(".gguf")]
    return printable(f"it has {', '.join(others[:_MOST_NAMED])}" if others else "it has no .gguf file")


def _choices(repo: str, files: Iterable[str]) -> str:
    """The .gguf files of a repository, each as short as it can be typed."""
    files = list(files)
    found = [each for each in dict.fromkeys(map(quantization, files)) if each is not None]
    alone = [each for each in found if sum(has_weights(file, each) for file in files) == 1]
    if not alone:
        return _named(files)
    ways = ", ".join(f"hf:{repo}:{each}" for each in alone)
    return printable(f"choose one of its .gguf files: {ways}")


def _sha256(lfs: Any) -> str | None:
    return lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)


def _licence(info: Any) -> str | None:
    """Of the model card; some cards give a name of their own instead of a known licence."""
    card = info.card_data
    values = [] if card is None else [getattr(card, "license_name", None), getattr(card, "license", None)]
    tags = [tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")]
    return next((printable(str(value), 60) for value in (*values, *tags) if value), None)
