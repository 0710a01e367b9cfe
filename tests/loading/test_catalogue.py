"""The models that kvarn knows by name."""

from pathlib import Path

from kvarn.loading.catalogue import DEFAULTS, MODELS, WheelModel, near, quantization


def test_the_catalogue():
    for name, model in MODELS.items():
        assert name == name.lower()
        assert model.file.endswith(".gguf")
        assert quantization(model.file), name
        assert isinstance(model, WheelModel) or model.repo.count("/") == 1, name
    assert quantization("model.gguf") is None
    families = {name.split(":")[0] for name in MODELS} - set(MODELS)
    assert set(DEFAULTS) == families, "every family has a default"
    assert all(DEFAULTS[family].split(":")[0] == family and DEFAULTS[family] in MODELS for family in families)
    assert near("lama3.2:1b", MODELS)[0] == "llama3.2:1b"
    assert near("xyzzy", MODELS) == []


def test_the_documentation_lists_the_catalogue():
    lines = (Path(__file__).parents[2] / "docs/models.md").read_text().split("## Names")[1].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    known = []
    for name, model in MODELS.items():
        source = f"package {model.wheel}" if isinstance(model, WheelModel) else model.repo
        known.append([f"`{name}`", quantization(model.file), source, model.file])
    assert [row for row in rows if len(row) == 4] == known


def test_the_documentation_lists_the_families():
    text = (Path(__file__).parents[2] / "docs/models.md").read_text()
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")
    ]
    assert {row[0]: row[1] for row in rows if row[0] in DEFAULTS} == DEFAULTS
