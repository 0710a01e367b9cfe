"""What came from the hub is used only after its SHA-256 was checked, and is checked once."""

import os
import shutil
from pathlib import Path

import pytest
from support.stub_hub import StubHub

from kvarn.errors import PullFailed
from kvarn.loading.catalogue import HubModel
from kvarn.loading.hub import fetch
from kvarn.loading.progress import quiet

FILE = HubModel("o/r", "a-Q8_0.gguf")
FOLDER = HubModel("o/r", "")
FILES = {"a-Q8_0.gguf": b"GGUF" * 9, "config.json": b"{}", "m.safetensors": b"weights"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubHub:
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path / "kvarn"))
    return StubHub(tmp_path / "hub", dict(FILES)).install(monkeypatch)


def get(model: HubModel, seen: list[str] | None = None) -> Path:
    def progress(what: str, done: int, total: int | None) -> None:
        if seen is not None:
            seen.append(what)

    return fetch(model, "it", progress, lambda text: None)


@pytest.mark.parametrize("model", [FILE, FOLDER], ids=["file", "folder"])
def test_checked_once_and_then_used_without_a_question(hub: StubHub, model: HubModel) -> None:
    path = get(model)
    hub.asked.clear()
    seen: list[str] = []
    assert get(model, seen) == path
    assert (hub.asked, seen) == ([], [])
    changed = path if model.file else path / "m.safetensors"
    os.utime(changed, ns=(1, 1))
    get(model, seen)
    assert any(what.startswith("checking") for what in seen), "a file that changed is checked again"


def interrupt(what: str, done: int, total: int | None) -> None:
    if what.startswith("checking"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("model", [FILE, FOLDER], ids=["file", "folder"])
def test_an_interrupted_check_is_made_up_for(hub: StubHub, model: HubModel) -> None:
    damaged = model.file or "m.safetensors"
    hub.arrives[damaged] = b"x" * len(FILES[damaged])
    with pytest.raises(KeyboardInterrupt):
        fetch(model, "it", interrupt, lambda text: None)
    assert (hub.snapshot / damaged).exists(), "the library has given it its name"
    if not model.file:
        with pytest.raises(PullFailed, match="arrived with SHA-256"):
            get(model)
    hub.arrives.clear()
    path = get(model)
    assert (path if model.file else path / damaged).read_bytes() == FILES[damaged]


def test_a_file_of_another_program_is_checked_without_a_question(hub: StubHub) -> None:
    path = get(FILE)
    shutil.rmtree(hub.cache.parent / "kvarn")
    hub.asked.clear()
    seen: list[str] = []
    assert get(FILE, seen) == path
    assert (hub.asked, set(seen)) == ([], {"checking it"})


def test_a_folder_without_the_hub(hub: StubHub) -> None:
    path = get(FOLDER)
    shutil.rmtree(hub.cache.parent / "kvarn")
    hub.online = False
    assert get(FOLDER) == path
    (path / "m.safetensors").resolve().write_bytes(b"WEIGHTS")
    with pytest.raises(PullFailed, match=r"it/m\.safetensors is damaged and was removed; go online"):
        get(FOLDER)
    with pytest.raises(PullFailed, match="could not be fetched"):
        get(HubModel("o/r", "", "Q4_K_M"))


@pytest.mark.parametrize("name", ["a[1]-Q8_0.gguf", "a*.gguf", "what?.gguf"])
def test_signs_of_patterns_in_names(hub: StubHub, name: str) -> None:
    hub.files[name] = b"GGUF!"
    hub.arrives[name] = b"GGUF?"
    with pytest.raises(PullFailed, match="arrived with SHA-256"):
        get(HubModel("o/r", name))
    assert not (hub.snapshot / name).exists()
    hub.arrives.clear()
    assert get(HubModel("o/r", name)).read_bytes() == b"GGUF!"


def test_contents_outside_of_the_cache_are_not_removed(hub: StubHub, tmp_path: Path) -> None:
    path = get(FILE)
    shutil.rmtree(hub.cache.parent / "kvarn")
    mine = tmp_path / path.resolve().name
    mine.write_bytes(b"another")
    path.unlink()
    path.symlink_to(mine)
    assert get(FILE).read_bytes() == FILES[FILE.file]
    assert mine.read_bytes() == b"another"


def test_a_file_by_its_quantization(hub: StubHub) -> None:
    hub.files |= {"x-q4_k_m.gguf": b"GGUF4", "mmproj-Q8_0.gguf": b"no model"}
    path = get(HubModel("o/r", "", "Q4_K_M"))
    assert path.name == "x-q4_k_m.gguf"
    hub.asked.clear()
    assert get(HubModel("o/r", "", "Q4_K_M")) == path
    assert hub.asked == []
    assert get(HubModel("o/r", "", "Q8_0")).name == "a-Q8_0.gguf"
    hub.files["y-Q6_K.gguf"] = hub.files["z-Q6_K.gguf"] = b"GGUF6"
    with pytest.raises(PullFailed, match=r"2 files with Q6_K; choose one: hf:o/r/y-Q6_K\.gguf, hf:o/r/z-Q6_K\.gguf$"):
        get(HubModel("o/r", "", "Q6_K"))
    with pytest.raises(PullFailed, match=r"no single \.gguf file with Q2_K; choose .*: hf:o/r:Q8_0, hf:o/r:Q4_K_M$"):
        get(HubModel("o/r", "", "Q2_K"))


def test_a_repository_of_gguf_files_only(hub: StubHub) -> None:
    hub.files = {"config.json": b"{}", "a-Q8_0.gguf": b"GGUF", "b.gguf": b"GGUF"}
    with pytest.raises(PullFailed, match=r"has no safetensors files; choose one of its \.gguf files: hf:o/r:Q8_0$"):
        get(FOLDER)
    assert hub.asked == ["o/r"], "nothing was downloaded"


def test_a_stamp_that_is_no_stamp(hub: StubHub) -> None:
    path = get(FILE)
    (stamp,) = (hub.cache.parent / "kvarn" / "checked").iterdir()
    for content in (b"", b"[]", b"{}", b'{"a-Q8_0.gguf": 5}', b"[" * 100_000, b"\xff"):
        stamp.write_bytes(content)
        seen: list[str] = []
        assert get(FILE, seen) == path
        assert seen, "checked again"
    assert fetch(FILE, "it", quiet, lambda text: None) == path
