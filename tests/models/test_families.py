"""A family of models is one file and one line in the table, and no other code knows its name."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.harness import Driven, bits, score
from support.tiny_files import hf_name, hf_settings, paired, safetensors, write_gguf, write_hf
from support.tiny_models import ARCHITECTURES, LOADING, shapes, weights

from kvarn.backends.reference import Reference
from kvarn.backends.reference.program import ReferenceProgram
from kvarn.cache.plan import CacheConfig
from kvarn.errors import BadModel, KvarnError
from kvarn.graph.ops import Rope
from kvarn.loading.checkpoint import Checkpoint, open_checkpoint
from kvarn.models import llama, qwen3
from kvarn.models.families import FAMILIES, family_of, graph_of
from kvarn.models.family import Family, GGUFRules, HFRules, Refusal
from kvarn.models.tensors import Fused
from kvarn.models.windows import all_but_every_nth

SOURCE = Path(__file__).resolve().parents[2] / "src" / "kvarn"

LIKE_LLAMA = Family(
    name="fable", forward=llama.forward, layer=llama.layer, hf=HFRules(model_types={"fable": llama.HF_DEFAULTS})
)
# One with every difference that a family can state.
ODD = Family(
    name="oddity",
    forward=qwen3.forward,
    layer=qwen3.layer,
    fused=(Fused(("attn_q", "attn_k", "attn_v"), gguf="attn_all", hf="self_attn.all"),),
    gguf=GGUFRules(
        adjacent_pairs=True,
        defaults={"local_base": 300.0},
        windows=lambda settings, config: all_but_every_nth(2, settings.integer("local_window"), config),
        local_rope_base="local_base",
        attention_scale=lambda config: config.head_dim**-1.0,
        refused=(Refusal("twist", (0,), "twisted attention"),),
    ),
    hf=HFRules(
        model_types={"oddity_text": llama.HF_DEFAULTS | {"base_of_local_layers": 300.0}},
        activation=("act", "silu"),
        windows=lambda settings, config: all_but_every_nth(2, settings.integer("local_window"), config),
        local_rope_base="base_of_local_layers",
        norm_offset=1.0,
        ignored=("ears.",),
        refused=(Refusal("twist", (False,), "twisted attention"),),
    ),
)


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in (LIKE_LLAMA, ODD):
        monkeypatch.setitem(FAMILIES, family.name, family)


def logits(checkpoint: Checkpoint) -> np.ndarray:
    graph = graph_of(checkpoint.config, checkpoint.shapes)
    program = ReferenceProgram(checkpoint.config, {name: checkpoint.tensor(name) for name in graph.weights})
    config = CacheConfig(checkpoint.config.layer_specs, 32, "paged", "f32")
    return score(program, Driven(config, Reference()), list(range(20)), 0, 20)


@pytest.mark.usefixtures("families")
def test_a_family_like_llama_takes_one_entry(tmp_path: Path) -> None:
    tensors = weights("llama")
    expected = open_checkpoint(write_hf(tmp_path / "llama", "llama", tensors))
    a = open_checkpoint(write_gguf(tmp_path / "m.gguf", "qwen2", tensors, called="fable"))  # no pairs, unlike llama
    b = open_checkpoint(write_hf(tmp_path / "hf", "llama", tensors, settings={"model_type": "fable"}))
    for found in (a, b):
        assert replace(found.config, name="", architecture="") == replace(expected.config, name="", architecture="")
        assert found.config.architecture == "fable"
        assert (bits(logits(found)) == bits(logits(expected))).all()


@pytest.mark.usefixtures("families")
def test_every_difference_that_a_family_can_state(tmp_path: Path) -> None:
    a, b = odd_gguf(tmp_path), odd_hf(tmp_path)
    expected = weights("qwen3")
    for found in (a, b):
        assert found.config.windows == (8, None)
        assert found.config.local_rope == Rope(300.0, LOADING.head_dim)
        assert {info.name for info in found.infos} == set(expected)
        for name, array in expected.items():
            assert np.array_equal(found.tensor(name), array), name
    assert (a.config.scale, b.config.scale) == (1 / 8, 8**-0.5)
    with pytest.raises(BadModel, match=r"oddity.twist is 1: kvarn has no twisted attention; use another model"):
        odd_gguf(tmp_path, {"oddity.twist": ("u32", 1)})
    with pytest.raises(BadModel, match="twist is True: kvarn has no twisted attention; use another model"):
        odd_hf(tmp_path, {"twist": True})
    with pytest.raises(BadModel, match="act is 'gelu': kvarn has no such activation here"):
        odd_hf(tmp_path, {"act": "gelu"})


def odd_gguf(folder: Path, keys: dict | None = None) -> Checkpoint:
    tensors = weights("qwen3")
    for i in range(LOADING.n_layers):
        block = f"blk.{i}.attn_"
        q, k, v = (tensors.pop(f"{block}{name}.weight") for name in "qkv")
        rows = [paired(q, LOADING.n_heads), paired(k, LOADING.n_kv_heads), v]
        tensors[f"{block}all.weight"] = np.concatenate(rows)
    keys = {"oddity.local_window": ("u32", 8)} | (keys or {})
    return open_checkpoint(write_gguf(folder / "m.gguf", "qwen3", tensors, keys=keys, called="oddity"))


def odd_hf(folder: Path, settings: dict | None = None) -> Checkpoint:
    tensors = {name: array - 1 if "norm" in name else array for name, array in weights("qwen3").items()}
    stored = {hf_name("qwen3", name): array for name, array in tensors.items()}
    for i in range(LOADING.n_layers):
        block = f"model.layers.{i}.self_attn."
        rows = [stored.pop(f"{block}{name}_proj.weight") for name in "qkv"]
        stored[f"{block}all.weight"] = np.concatenate(rows)
    stored["ears.weight"] = np.zeros(2, np.float32)
    given = hf_settings("qwen3") | {"model_type": "oddity_text", "local_window": 8} | (settings or {})
    write_hf(folder / "odd", "qwen3", {"token_embd.weight": np.zeros(1, np.float32)}, settings=given)
    (folder / "odd" / "model.safetensors").write_bytes(safetensors(stored))
    return open_checkpoint(folder / "odd")


def test_without_its_entry_a_family_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="is a fable model, and kvarn runs: llama"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", "qwen2", weights("llama"), called="fable"))
    with pytest.raises(BadModel, match="is a fable model, and kvarn runs: llama"):
        open_checkpoint(write_hf(tmp_path / "hf", "llama", settings={"model_type": "fable"}))
    config = open_checkpoint(write_hf(tmp_path / "llama", "llama")).config
    with pytest.raises(KvarnError, match="'fable' is not implemented; use one of: llama, qwen2"):
        family_of(replace(config, architecture="fable"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tensors_of_a_family(tmp_path: Path, architecture: str) -> None:
    """They are those that the tests' own description of the model has."""
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", architecture)).config
    tensors = FAMILIES[architecture].tensors(config)
    required = {name: tensor.shape for name, tensor in tensors.items() if tensor.required}
    assert required == shapes(architecture, LOADING, tied=True)
    optional = {"output.weight", "rope_freqs.weight"}
    optional |= {f"blk.{i}.attn_{part}.bias" for i in range(2) for part in ("q", "k", "v", "output")}
    assert tensors.keys() - required.keys() == optional - required.keys()


# Words that are also names of families: kinds of tokenizers, a part of names of models, and a way to write tool calls.
OTHER_MEANINGS = {
    "text/from_gguf.py": {"llama", "phi3"},
    "forecast/outlined.py": {"llama"},  # a kind of vocabulary
    "text/pretokenizers.py": {"qwen2"},
    "dialect/families.py": {"mistral"},
}


def strings_of(path: Path) -> Iterator[ast.Constant]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node


def named_elsewhere(source: Path) -> list[str]:
    """Places where a family is named outside its own file."""
    names = set(FAMILIES) | {name for family in FAMILIES.values() for name in family.hf.model_types}
    own = {
        f"models/{family.name}.py": {family.name, *family.hf.model_types, *family.hf.multimodal}
        for family in FAMILIES.values()
    }
    found = []
    for path in sorted(source.rglob("*.py")):
        file = path.relative_to(source).as_posix()
        other = names - own.get(file, set()) - OTHER_MEANINGS.get(file, set())
        found += [f"{file}:{each.lineno}: {each.value!r}" for each in strings_of(path) if each.value in other]
    return found


def test_only_its_own_file_names_a_family() -> None:
    assert named_elsewhere(SOURCE) == []


def test_a_branch_on_a_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "phi3.py").write_text('NAME = "phi3"\nOTHER = name == "gemma3_text"\n')
    (tmp_path / "a.py").write_text('"""Text about llama."""\nif name in ("llama", "x"): pass\n')
    assert named_elsewhere(tmp_path) == ["a.py:2: 'llama'", "models/phi3.py:2: 'gemma3_text'"]
