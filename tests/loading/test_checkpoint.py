"""Checkpoints: the same model from either kind of file gives the same configuration and the same canonical tensors."""

import dataclasses
import json

import numpy as np
import pytest
from support.models import SMOLLM2, model
from support.tiny_files import paired, safetensors, write_gguf, write_hf
from support.tiny_models import ARCHITECTURES, LOADING, weights

from kvarn.errors import BadModel
from kvarn.graph.ops import FactorScaling, Rope
from kvarn.loading.checkpoint import open_checkpoint
from kvarn.loading.encodings import ENCODINGS
from kvarn.loading.quants import dequantize
from kvarn.loading.safetensors import SafetensorsFolder

N_HEADS, HEAD_DIM, HIDDEN = LOADING.n_heads, LOADING.head_dim, LOADING.hidden


def same(checkpoint, expected: dict[str, np.ndarray]) -> None:
    assert {info.name for info in checkpoint.infos} == set(expected)
    for name, array in expected.items():
        found = checkpoint.tensor(name)
        assert found.dtype == np.float32
        assert found.shape == array.shape, name
        assert np.array_equal(found, array), name
        encoded = checkpoint.encoded(name)
        assert encoded.rows.shape[1] == ENCODINGS[encoded.type].row_bytes(array.shape[-1])
        assert np.array_equal(dequantize(encoded.rows, encoded.type, encoded.shape), array), name
        if array.ndim > 1 and encoded.type == checkpoint.infos[0].type:
            same_parts(checkpoint, name, encoded.rows)


def same_parts(checkpoint, name: str, rows: np.ndarray) -> None:
    """Parts of a tensor's rows, of any length."""
    n = len(rows)
    for start, stop in ((0, n), (0, 1), (n - 1, n), (n // 3, n // 2 + 1)):
        out = np.full((stop - start, rows.shape[1]), 0xA5, np.uint8)
        checkpoint.read_rows(name, start, out)
        assert np.array_equal(out, rows[start:stop]), (name, start, stop)


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gguf_and_hugging_face_give_the_same_tensors(tmp_path, architecture, type_name):
    expected = weights(architecture)
    a = open_checkpoint(write_gguf(tmp_path / "m.gguf", architecture, type_name=type_name))
    b = open_checkpoint(write_hf(tmp_path / "hf", architecture, dtype=type_name))
    assert (a.kind, b.kind) == ("gguf", "safetensors")
    assert (a.folder, b.folder, b.metadata) == (None, tmp_path / "hf", {})
    assert a.metadata["general.architecture"] == architecture
    same(a, expected)
    same(b, expected)
    assert dataclasses.replace(a.config, name="") == dataclasses.replace(b.config, name="")
    assert b.config.name == "hf"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_config(tmp_path, architecture):
    c = open_checkpoint(write_gguf(tmp_path / "m.gguf", architecture)).config
    assert (c.architecture, c.name) == (architecture, f"tiny {architecture}")
    sizes = ("n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden", "feed_forward", "vocab_size", "context")
    assert {size: getattr(c, size) for size in sizes} == {size: getattr(LOADING, size) for size in sizes}
    assert (c.norm_eps, c.rope) == (2.0**-20, Rope(50000.0, HEAD_DIM))
    gemma = architecture == "gemma3"
    assert c.windows == ((16, 16) if gemma else (None, None))
    assert c.local_rope == (Rope(10000.0, HEAD_DIM) if gemma else None)
    assert c.scale == HEAD_DIM**-0.5
    assert len(c.layer_specs) == LOADING.n_layers


def test_permutation_is_undone_row_by_row(tmp_path):
    """A head of 8: stored rows are 0 4 1 5 2 6 3 7 of the canonical ones."""
    assert paired(np.arange(8), 1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    expected = weights("llama")
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", type_name="Q8_0"))
    name = "blk.0.attn_q.weight"
    found = checkpoint.tensor(name)
    assert np.abs(found - expected[name]).max() < 0.02
    assert checkpoint.encoded(name).type == "Q8_0", "quantized rows move whole"
    assert np.array_equal(checkpoint.tensor("blk.1.attn_k.bias"), expected["blk.1.attn_k.bias"])


def test_partial_rotation_is_undone_in_the_rotated_part_only(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", keys={"llama.rope.dimension_count": ("u32", 4)})
    checkpoint = open_checkpoint(path)
    stored = paired(weights("llama")["blk.0.attn_q.weight"], N_HEADS).reshape(N_HEADS, HEAD_DIM, HIDDEN)
    expected = stored[:, [0, 2, 1, 3, 4, 5, 6, 7]].reshape(-1, HIDDEN)
    assert np.array_equal(checkpoint.tensor("blk.0.attn_q.weight"), expected)


def test_quantized_tensors_are_views_where_no_row_moves(tmp_path):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "qwen2", type_name="Q4_0"))
    for info in checkpoint.infos:
        assert not checkpoint.encoded(info.name).rows.flags.owndata
    assert not np.shares_memory(checkpoint.tensor("output_norm.weight"), checkpoint.encoded("output_norm.weight").rows)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_tied(tmp_path, architecture):
    tied = weights(architecture, tied=True)
    a = open_checkpoint(write_gguf(tmp_path / "m.gguf", architecture, tied))
    b = open_checkpoint(write_hf(tmp_path / "a", architecture, tied, settings={"tie_word_embeddings": True}))
    stored_anyway = write_hf(tmp_path / "b", architecture, settings={"tie_word_embeddings": True})
    for checkpoint in (a, b, open_checkpoint(stored_anyway)):
        assert not checkpoint.has("output.weight")
        same(checkpoint, tied)
    with pytest.raises(BadModel, match="ask `has` first"):
        a.tensor("output.weight")


@pytest.mark.parametrize("shards", [2, 3])
def test_shards(tmp_path, shards):
    folder = write_hf(tmp_path / "hf", "qwen3", dtype="BF16", shards=shards)
    same(open_checkpoint(folder), weights("qwen3"))
    (folder / f"model-00002-of-0000{shards}.safetensors").unlink()
    with pytest.raises(BadModel, match=r"model-00002-of-.* is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_multimodal_gemma_is_read_for_its_text(tmp_path, prefix):
    folder = write_hf(tmp_path / "hf", "gemma3")
    settings = json.loads((folder / "config.json").read_text())
    text = {k: v for k, v in settings.items() if k != "model_type"}
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    plain = SafetensorsFolder.open(folder)
    names = {n: n.replace("model.", prefix, 1) for n in plain.tensors}
    stored = {names[n]: plain.load(n) for n in plain.tensors} | {"vision_tower.x.weight": np.zeros((2, 2), np.float32)}
    (folder / "model.safetensors").write_bytes(safetensors(stored))
    same(open_checkpoint(folder), weights("gemma3"))


def test_safetensors_folder(tmp_path):
    folder = SafetensorsFolder.open(write_hf(tmp_path, "llama", dtype="BF16"))
    assert folder.config["model_type"] == "llama"
    assert folder.tensors["model.norm.weight"].type == "BF16"
    assert np.array_equal(folder.load("lm_head.weight"), weights("llama")["output.weight"])
    with pytest.raises(BadModel, match="has no tensor nope"):
        folder.load("nope")


def replaced(folder, file, content):
    (folder / file).write_bytes(content) if content is not None else (folder / file).unlink()


BAD_FOLDERS = {
    "no config": ("config.json", None, "has no config.json, so it is no model; give a .gguf file"),
    "config no JSON": ("config.json", b"{", "is not JSON"),
    "config too deep": ("config.json", b"[" * 100_000, "is not JSON"),
    "config not UTF-8": ("config.json", b'{"a": "\xff"}', "is not JSON"),
    "config a list": ("config.json", b"[]", "no JSON object"),
    "config empty": ("config.json", b"{}", "does not say model_type"),
    "no weights": ("model.safetensors", None, "neither model.safetensors nor"),
    "weights cut": ("model.safetensors", safetensors({"a": np.zeros(4, np.float32)})[:-1], "cut short or damaged"),
    "weights empty": ("model.safetensors", b"", "cut short or damaged"),
    "weights absurd": ("model.safetensors", b"\xff" * 64, "cut short or damaged"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_damaged_folder_is_refused_in_one_line(tmp_path, case):
    file, content, expected = BAD_FOLDERS[case]
    folder = write_hf(tmp_path / "hf", "llama")
    replaced(folder, file, content)
    with pytest.raises(BadModel) as caught:
        open_checkpoint(folder)
    assert expected in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (b"{}", "no weight_map"),
        (b'{"weight_map": {"a": "../x.safetensors"}}', "no file name"),
        (b'{"weight_map": {"a": 1}}', "no file name"),
        (b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', "has no tensor a, which"),
    ],
)
def test_bad_index(tmp_path, index, expected):
    folder = write_hf(tmp_path / "hf", "llama", shards=2)
    (folder / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(BadModel, match=expected):
        open_checkpoint(folder)


def test_weights_of_another_type_are_refused(tmp_path):
    folder = write_hf(tmp_path / "hf", "llama")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole.replace(b'"F32"', b'"I32"'))
    with pytest.raises(BadModel, match="is I32, which kvarn does not read"):
        open_checkpoint(folder)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_missing_tensor_is_named(tmp_path, architecture):
    fused = {"attn_q.weight", "attn_k.weight", "attn_v.weight", "ffn_gate.weight", "ffn_up.weight"}
    for name in weights(architecture):
        may_lack = name == "output.weight" or (name.endswith(".bias") and architecture == "llama")
        if may_lack or (architecture == "phi3" and name.split(".", 2)[-1] in fused):
            continue
        with pytest.raises(BadModel, match=f"has no tensor {name}"):
            open_checkpoint(write_gguf(tmp_path / "m.gguf", architecture, drop=[name]))


def test_missing_fused_tensor_and_head_are_named(tmp_path):
    with pytest.raises(BadModel, match=r"has no tensor blk.1.attn_q.weight"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", "phi3", drop=["blk.1.attn_qkv.weight"]))
    with pytest.raises(BadModel, match=r"has no tensor lm_head.weight"):
        open_checkpoint(write_hf(tmp_path / "a", "llama", drop=["lm_head.weight"]))
    with pytest.raises(BadModel, match=r"has no tensor blk.0.ffn_down.weight"):
        open_checkpoint(write_hf(tmp_path / "b", "llama", drop=["model.layers.0.mlp.down_proj.weight"]))


def test_wrong_shape_and_left_over_tensors_are_refused(tmp_path):
    odd = weights("llama") | {"blk.0.ffn_up.weight": np.zeros((3, HIDDEN), np.float32)}
    more = weights("llama") | {"blk.0.attn_q_norm.weight": np.zeros(HEAD_DIM, np.float32)}
    with pytest.raises(BadModel, match=r"tensor blk.0.ffn_up.weight is \(3, 32\), not \(64, 32\)"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", odd))
    with pytest.raises(BadModel, match=r"has the tensor blk.0.attn_q_norm.weight, which a llama model has no use for"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", more))


def test_rope_factors_are_a_setting(tmp_path):
    factors = np.array([1, 1, 2, 8], np.float32)
    path = write_gguf(tmp_path / "m.gguf", "llama", weights("llama") | {"rope_freqs.weight": factors})
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.rope.scaling == FactorScaling((1.0, 1.0, 2.0, 8.0))
    assert np.array_equal(checkpoint.tensor("rope_freqs.weight"), factors)
    for bad in (factors[:3], factors * 0, factors * np.nan):
        with pytest.raises(BadModel, match="rope_freqs"):
            open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", weights("llama") | {"rope_freqs.weight": bad}))


@pytest.mark.parametrize("name", [SMOLLM2, "gemma-3-270m-q4_k_m.gguf", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"])
def test_real_models_open_whole(name):
    checkpoint = open_checkpoint(model(name))
    c = checkpoint.config
    assert checkpoint.tensor("blk.0.attn_q.weight").shape == (c.n_heads * c.head_dim, c.hidden)
    assert np.isfinite(checkpoint.tensor("output_norm.weight")).all()
    if name.startswith("gemma"):
        assert c.windows == ((512,) * 5 + (None,)) * 3
        assert c.local_rope == Rope(10000.0, 256)


def test_a_folder_that_holds_gguf_files_names_them(tmp_path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(BadModel, match=r"no config.json, so it is no model; it holds a.gguf, b.gguf: give such a file"):
        open_checkpoint(tmp_path)
