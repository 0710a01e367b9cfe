"""The Hugging Face hub with the real library and a hub on loopback: what is told, checked, resumed, listed, removed."""

import contextlib
import json
import os
import random
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import pytest
from support.fake_hub import COMMIT, FakeHub, running
from support.tiny_gguf import write

from kvarn.errors import PullFailed
from kvarn.loading import hub_library, names
from kvarn.loading.pull import resolve

IN_TURN = """
import contextlib, io, json, sys
from kvarn.cli import main
said = []
for line in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(line.split())
    said.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(said))
"""
CONTENT = b"GGUF" + random.Random(2).randbytes(1 << 20)
LONG = CONTENT * 12  # the library keeps what arrived in pieces of 10 MiB
SMALL = {"Qwen/Qwen3-0.6B-GGUF": {"Qwen3-0.6B-Q8_0.gguf": CONTENT, "README.md": b"a model"}}


class Said(NamedTuple):
    status: int
    out: str
    err: str


def in_turn(folder: Path, endpoint: str, *lines: str) -> list[Said]:
    """Each command line in turn, in one fresh process: the library reads its settings when it is imported."""
    environment = {"HF_HOME": str(folder / "hf"), "KVARN_CACHE": str(folder / "kvarn"), "HF_ENDPOINT": endpoint}
    done = subprocess.run(
        [sys.executable, "-c", IN_TURN],
        input=json.dumps(lines),
        env=os.environ | environment | {"HF_HUB_DISABLE_TELEMETRY": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [Said(*each) for each in json.loads(done.stdout)]


def test_a_named_model_from_pull_to_rm(tmp_path: Path) -> None:
    with running(FakeHub({"Qwen/Qwen3-0.6B-GGUF": {"Qwen3-0.6B-Q8_0.gguf": LONG}})) as fake:
        fake.cut["Qwen3-0.6B-Q8_0.gguf"] = 11 << 20
        lines = (
            "pull qwen3:0.6b",
            "pull qwen3:0.6b",
            "list --json",
            "rm qwen3:0.5b",
            "rm -y qwen3:0.6b",
            "list --json",
        )
        first, again, listed, missing, removed, empty = in_turn(tmp_path, fake.url, *lines)
        path = Path(first.out.strip())
    assert first.err == "Qwen/Qwen3-0.6B-GGUF, Q8_0, 13 MB, apache-2.0\n", "told before the download; no other remark"
    assert [line.split()[-1] for line in fake.asked if " bytes=" in line] == ["bytes=10485760-"], "the rest, not all"
    assert again == (0, first.out, ""), "what is here is used without a question"
    assert len([line for line in fake.asked if line.startswith("GET /api/models")]) == 1
    (model,) = json.loads(listed.out)["models"]
    assert (model["name"], model["path"], model["bytes"]) == ("qwen3:0.6b", str(path), len(LONG))
    assert missing[:2] == (1, "")
    assert missing.err == "kvarn rm: qwen3:0.5b is not on this machine; did you mean qwen3:0.6b?\n"
    assert removed.out == "removed qwen3:0.6b; 13 MB freed\n"
    assert not path.exists()
    assert json.loads(empty.out)["models"] == []


def test_what_arrives_wrong_is_removed(tmp_path: Path) -> None:
    with running(FakeHub(SMALL, licence=None)) as fake:
        fake.lies["Qwen3-0.6B-Q8_0.gguf"] = "0" * 64
        wrong, listed = in_turn(tmp_path, fake.url, "pull qwen3:0.6b", "list --json")
    assert wrong.status == 1
    right = sha256(CONTENT).hexdigest()
    assert f"qwen3:0.6b arrived with SHA-256 {right}, not {'0' * 64}, and was removed; try again\n" in wrong.err
    assert wrong.err.startswith("Qwen/Qwen3-0.6B-GGUF, Q8_0, 1.0 MB\n"), "no licence is told if there is none"
    assert json.loads(listed.out)["models"] == []


def test_references_and_their_errors(tmp_path: Path) -> None:
    gguf = write(tmp_path / "tiny-F32.gguf", "qwen3").read_bytes()
    files = {"config.json": b'{"model_type": "llama"}', "m.safetensors": b"x" * 3000, "extra.bin": b"y"}
    repos = {"o/folder": files, "o/two": {"a-Q8_0.gguf": gguf, "sub/b.gguf": CONTENT, "sub/a-Q8_0.gguf": b"GGUF"}}
    with running(FakeHub(repos)) as fake:
        folder, a, same, b, listed, one, other, rest, nothing, no_file = in_turn(
            tmp_path,
            fake.url,
            *("pull hf:o/folder", "pull hf:o/two/a-Q8_0.gguf", "pull hf:o/two/sub/a-Q8_0.gguf"),
            *("pull hf:o/two/sub/b.gguf", "list --json", "rm -y hf:o/two/sub/b.gguf", "rm -y hf:o/two/sub/a-Q8_0.gguf"),
            *("list --json", "pull hf:o/nothing", "pull hf:o/two/c.gguf"),
        )
        (offline,) = in_turn(tmp_path, "http://127.0.0.1:9", "pull hf:o/folder")
    assert folder.err == "o/folder, 2 files, 3.0 kB, apache-2.0\n"
    assert sorted(path.name for path in Path(folder.out.strip()).iterdir()) == ["config.json", "m.safetensors"]
    names = {model["name"]: model for model in json.loads(listed.out)["models"]}
    assert list(names) == ["hf:o/folder", "hf:o/two/a-Q8_0.gguf", "hf:o/two/sub/a-Q8_0.gguf", "hf:o/two/sub/b.gguf"]
    assert [model["family"] for model in names.values()] == ["llama", "qwen3", None, None]
    assert [model["quantization"] for model in names.values()] == [None, "Q8_0", "Q8_0", None]
    assert one.out == "removed hf:o/two/sub/b.gguf; 1.0 MB freed\n"
    assert other.out == "removed hf:o/two/sub/a-Q8_0.gguf; 4 bytes freed\n"
    assert not Path(b.out.strip()).exists()
    assert not Path(same.out.strip()).exists()
    assert Path(a.out.strip()).read_bytes() == gguf, "its neighbour stays"
    assert len(json.loads(rest.out)["models"]) == 2
    assert COMMIT in a.out, "all repositories here have the same commit, and only the right one was touched"
    assert "could not be fetched (the hub has no such repository, or hides it); check the name" in nothing.err
    assert (
        no_file.err
        == "kvarn pull: o/two on the hub has no file c.gguf; it has a-Q8_0.gguf, sub/b.gguf, sub/a-Q8_0.gguf\n"
    )
    assert offline == (0, folder.out, ""), "a folder that is here is used without the hub"


@pytest.mark.parametrize("name", ["hf:", "hf:org", "hf:org//x", "hf:/repo", "hf:org/repo/../x"])
def test_references_that_name_nothing(name: str) -> None:
    with pytest.raises(PullFailed, match="names no model; write hf:org/repo"):
        names.hub_model(name)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PullFailed, match="hf:org/repo needs the package huggingface_hub: pip install huggingface_hub"):
        resolve("hf:org/repo")


def test_progress_in_bytes() -> None:
    told = []

    def download(repo: str, tqdm_class: type | None = None) -> None:
        pass

    bar = hub_library.bar(download, "m", 100, lambda *each: told.append(each))["tqdm_class"]
    with contextlib.closing(bar(total=100, initial=40, unit="B", unit_scale=True)) as shown:
        shown.update(60)
    with contextlib.closing(bar(total=3)) as files:
        files.update(1)
    assert told == [("fetching m", 0, 100), ("fetching m", 100, 100)], "the bar that counts files says nothing"
    assert hub_library.bar(lambda repo: None, "m", 0, lambda *each: None) == {}, "libraries that do not take a bar"
