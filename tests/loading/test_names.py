"""Names as people type them."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants

from kvarn.errors import KvarnError, PullFailed
from kvarn.loading.catalogue import MODELS, HubModel
from kvarn.loading.names import meaning, short_name
from kvarn.loading.pull import resolve


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cache" / "models"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("smollm2", "smollm2"),
        ("SmolLM2", "smollm2"),
        ("smollm2:latest", "smollm2"),
        ("QWEN3:0.6B", "qwen3:0.6b"),
        ("qwen3", "qwen3:1.7b"),
        ("Llama3.2:latest", "llama3.2:1b"),
        ("phi3", "phi3:mini"),
    ],
)
def test_names_of_the_catalogue(text: str, name: str) -> None:
    meant = meaning(text)
    assert (meant.model, meant.name) == (MODELS[name], name)
    is_family = text.lower().removesuffix(":latest") not in MODELS
    assert meant.note == (f"{text} is short for {name}" if is_family else "")


FILE = HubModel("org/repo", "sub/m.gguf")
HOST = urlsplit(constants.ENDPOINT).hostname or ""


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("hf:org/repo", HubModel("org/repo", "")),
        ("hf:org/repo/sub/m.gguf", FILE),
        ("HF:org/repo:q4_k_m", HubModel("org/repo", "", "Q4_K_M")),
        ("hf:org/repo:latest", HubModel("org/repo", "")),
        ("hf.xy/org/repo", HubModel("org/repo", "")),  # the hub's short address
        (f"{HOST}/org/repo:Q8_0", HubModel("org/repo", "", "Q8_0")),
        (f"https://{HOST}/org/repo/", HubModel("org/repo", "")),
        (f"https://www.{HOST}/org/repo/blob/main/sub/m.gguf", FILE),
        (f"http://{HOST.upper()}/org/repo/resolve/main/sub/m.gguf?download=true", FILE),
        ("org/repo", HubModel("org/repo", "")),
        ("org/repo:Q8_0", HubModel("org/repo", "", "Q8_0")),
    ],
)
def test_references_to_the_hub(text: str, model: HubModel) -> None:
    meant = meaning(text)
    assert meant.model == model
    bare = text.startswith("org/")
    assert meant.note == (f"there is no file or folder {text}; taking hf:{text}" if bare else "")


def test_a_path_comes_first(tmp_path: Path) -> None:
    (tmp_path / "org/repo").mkdir(parents=True)
    assert meaning("org/repo").model == Path("org/repo")


def test_files_in_the_models_folder(folder: Path) -> None:
    for name in ("Gemma-Q4.gguf", "mistral.gguf", "Twice.gguf", "twice.gguf", "smollm2.gguf", ".hidden.gguf"):
        (folder / name).write_bytes(b"GGUF")
    (folder / "tensors").mkdir()
    (folder / "tensors/config.json").write_text("{}")
    for text in ("Gemma-Q4", "gemma-q4", "gemma-q4.GGUF", "Gemma-Q4.gguf"):
        assert meaning(text).model == folder / "Gemma-Q4.gguf"
    assert meaning("mistral").model == folder / "mistral.gguf", "what is here comes before a family"
    assert meaning("smollm2").model == MODELS["smollm2"], "and after a name"
    assert resolve("tensors") == folder / "tensors"
    assert meaning("twice").model == folder / "twice.gguf"
    with pytest.raises(PullFailed, match=r"TWICE can be Twice\.gguf or twice\.gguf; write it with"):
        meaning("TWICE")
    with pytest.raises(PullFailed, match=r"there is no model '\.hidden'"):
        meaning(".hidden")
    shown = {path.name: short_name(path) for path in folder.iterdir() if not path.name.startswith(".")}
    assert shown == {
        "Gemma-Q4.gguf": "Gemma-Q4",
        "mistral.gguf": "mistral",
        "Twice.gguf": "Twice",
        "twice.gguf": "twice",
        "smollm2.gguf": "smollm2.gguf",
        "tensors": "tensors",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the name of the model is empty"),
        ("~nouser-at-all/m.gguf", "there is no home folder ~nouser-at-all;"),
        ("a\0b", "NUL character"),
        ("x" * 5000, "cannot be read: File name too long"),
        ("qwen3:9b", "did you mean qwen3:8b, qwen3:4b or qwen3:1.7b"),
        (f"{HOST}/org", "names no model; write hf:org/repo"),
        ("https://other.example/org/repo", "no such file or folder"),
        ("a/b/c", "a/b/c: no such file or folder"),
        ("../models", "no such file or folder"),
    ],
)
def test_names_that_mean_nothing(text: str, said: str) -> None:
    with pytest.raises(KvarnError) as caught:
        resolve(text)
    assert said in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def test_org_repo_that_may_have_been_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> Path:
        raise PullFailed("hf:some/folder could not be fetched")

    monkeypatch.setattr("kvarn.loading.hub.fetch", refuse)
    told: list[str] = []
    with pytest.raises(PullFailed, match=r"^there is no file or folder some/folder, and hf:some/folder could not be"):
        resolve("some/folder", announce=told.append)
    with pytest.raises(PullFailed, match=r"^there is no file"):
        resolve("some/folder", progress=lambda what, done, total: told.append(what))
    assert told == ["there is no file or folder some/folder; taking hf:some/folder"] * 2
