"""A model's settings from GGUF keys and from config.json: spellings, defaults, traps and refusals."""

from dataclasses import replace

import numpy as np
import pytest
from support.tiny_files import write_gguf, write_hf
from support.tiny_models import LOADING, weights

from kvarn.errors import BadModel
from kvarn.graph.ops import LinearScaling, Llama3Scaling, Rope, YarnScaling
from kvarn.loading.checkpoint import open_checkpoint
from kvarn.loading.hf_config import hf_config
from kvarn.models.config import ModelConfig
from kvarn.models.windows import all_but_every_nth

N_LAYERS, N_HEADS, HEAD_DIM = LOADING.n_layers, LOADING.n_heads, LOADING.head_dim
HIDDEN, CONTEXT = LOADING.hidden, LOADING.context


def from_gguf(tmp_path, architecture="llama", **keys) -> ModelConfig:
    """Keys without the architecture's name, dots as double underscores; None leaves one out."""
    full = {f"{architecture}.{k.replace('__', '.')}": v for k, v in keys.items()}
    return open_checkpoint(write_gguf(tmp_path / "m.gguf", architecture, keys=full)).config


def from_hf(tmp_path, architecture="llama", **settings) -> ModelConfig:
    return open_checkpoint(write_hf(tmp_path / "hf", architecture, settings=settings)).config


LLAMA3 = {"factor": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16, "attention_factor": 1.5}
SCALINGS = {
    "default": ({}, None),
    "linear": ({"factor": 8.0}, LinearScaling(8.0)),
    "llama3": (LLAMA3, Llama3Scaling(32.0, 1.0, 4.0, 8192)),
    "yarn": (YARN, YarnScaling(4.0, 32, 16.0, 1.0, 1.5)),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_rope_scaling_in_every_spelling(tmp_path, kind):
    given, scaling = SCALINGS[kind]
    expected = Rope(50000.0, HEAD_DIM, scaling)
    assert from_hf(tmp_path, rope_scaling=given | {"rope_type": kind}).rope == expected
    assert from_hf(tmp_path, rope_scaling=given | {"type": kind}).rope == expected
    new = given | {"rope_type": kind, "rope_theta": 7000.0}
    assert from_hf(tmp_path, rope_parameters=new).rope == Rope(7000.0, HEAD_DIM, scaling)
    assert from_hf(tmp_path, rope_parameters=new, rope_theta=None).rope.base == 7000.0


def test_gguf_rope_scaling(tmp_path):
    def scaling(**keys):
        return from_gguf(tmp_path, **keys).rope.scaling

    assert scaling(rope__scaling__type=("str", "none")) is None
    assert scaling(rope__scaling__factor=("f32", 1.0)) is None
    assert scaling(rope__scaling__factor=("f32", 8.0)) == LinearScaling(8.0)
    assert scaling(rope__scale_linear=("f32", 4.0)) == LinearScaling(4.0)
    yarn = dict(rope__scaling__type=("str", "yarn"), rope__scaling__factor=("f32", 4.0))
    assert scaling(**yarn, rope__scaling__original_context_length=("u32", 32)) == YarnScaling(4.0, 32)
    assert scaling(**yarn) == YarnScaling(4.0, CONTEXT)
    changed = scaling(**yarn, rope__scaling__attn_factor=("f32", 0.5))
    assert changed.attention_factor == pytest.approx(0.5 * (1 + 0.1 * np.log(4.0)))


@pytest.mark.parametrize("kind", ["longrope", "su", "dynamic", "llama4"])
def test_unknown_rope_scaling_is_refused_by_name(tmp_path, kind):
    with pytest.raises(BadModel, match=f"the rope scaling {kind}, and kvarn has"):
        from_hf(tmp_path, rope_scaling={"type": kind, "factor": 2.0})
    with pytest.raises(BadModel, match=f"needs the rope scaling {kind}"):
        from_gguf(tmp_path, rope__scaling__type=("str", kind))


def test_longrope_tensors_are_refused(tmp_path):
    tensors = weights("phi3") | {"rope_factors_long.weight": np.ones(HEAD_DIM // 2, np.float32)}
    with pytest.raises(BadModel, match="longrope"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", "phi3", tensors))


def test_missing_keys_have_defaults(tmp_path):
    keys = "head_count_kv", "key_length", "value_length"
    missing = [f"qwen2.attention.{key}" for key in keys]
    missing += ["qwen2.rope.freq_base", "qwen2.rope.dimension_count", "general.name"]
    tensors = weights("qwen2")
    for name in list(tensors):
        if ".attn_k." in name or ".attn_v." in name:  # as many key heads as query heads
            tensors[name] = np.concatenate([tensors[name]] * 2)
    path = write_gguf(tmp_path / "m.gguf", "qwen2", tensors, keys=dict.fromkeys(missing))
    config = open_checkpoint(path).config
    assert (config.n_kv_heads, config.rope, config.name) == (N_HEADS, Rope(10000.0, HEAD_DIM), "m")


@pytest.mark.parametrize(
    "key", ["block_count", "context_length", "embedding_length", "attention.head_count", "feed_forward_length"]
)
def test_required_keys(tmp_path, key):
    name = key.replace(".", "__")
    with pytest.raises(BadModel, match=f"does not say llama.{key}"):
        from_gguf(tmp_path, **{name: None})
    for bad in (("u32", 0), ("str", "4"), ("f32", 1.5), ("bool", 1), ("i32", -1), ("u64", 2**63)):
        with pytest.raises(BadModel, match=f"llama.{key} is "):
            from_gguf(tmp_path, **{name: bad})


def test_heads_by_layer(tmp_path):
    assert from_gguf(tmp_path, attention__head_count=("[u32", [4, 4])).n_heads == 4
    with pytest.raises(BadModel, match="differs from layer to layer"):
        from_gguf(tmp_path, attention__head_count=("[u32", [4, 2]))


def test_numbers_that_do_not_fit_together(tmp_path):
    with pytest.raises(BadModel, match="4 heads do not share 3 key heads evenly"):
        from_gguf(tmp_path, attention__head_count_kv=("u32", 3))
    with pytest.raises(BadModel, match="10 of 8 dimensions cannot be rotated"):
        from_gguf(tmp_path, rope__dimension_count=("u32", 10))
    with pytest.raises(BadModel, match="4000000000 layers and has only"):
        from_gguf(tmp_path, block_count=("u32", 4_000_000_000))
    with pytest.raises(BadModel, match=f"{2**31} layers and has only"):  # before a list of them is made
        from_hf(tmp_path, "qwen2", num_hidden_layers=2**31, use_sliding_window=True)
    with pytest.raises(BadModel, match="not a positive number"):
        from_gguf(tmp_path, rope__freq_base=("f32", float("nan")))
    with pytest.raises(BadModel, match="one head size for both"):
        from_gguf(tmp_path, attention__value_length=("u32", 16))


def test_windows_of_mistral_phi3_and_qwen(tmp_path):
    assert from_hf(tmp_path, model_type="mistral", sliding_window=16).windows == (16, 16)
    assert from_hf(tmp_path, model_type="mistral", sliding_window=None).windows == (None, None)
    assert from_hf(tmp_path, model_type="mistral", max_position_embeddings=8192).windows == (4096, 4096), "its default"
    assert from_hf(tmp_path, "phi3", sliding_window=16).windows == (16, 16)
    assert from_hf(tmp_path, "phi3", sliding_window=CONTEXT).windows == (None, None), "hides nothing"
    assert from_hf(tmp_path, "qwen2", sliding_window=16).windows == (None, None)
    used = dict(sliding_window=16, use_sliding_window=True)
    assert from_hf(tmp_path, "qwen2", **used, max_window_layers=1).windows == (None, 16)
    assert from_hf(tmp_path, "qwen2", **used).windows == (None, None), "28 layers have none by default"
    types = ["sliding_attention", "full_attention"]
    assert from_hf(tmp_path, "qwen3", **used, layer_types=types).windows == (16, None)
    assert from_gguf(tmp_path, "phi3", attention__sliding_window=("u32", 16)).windows == (16, 16)
    assert from_gguf(tmp_path, "llama", attention__sliding_window=("u32", 16)).windows == (16, 16)
    assert from_gguf(tmp_path, "qwen2", attention__sliding_window=("u32", 16)).windows == (None, None)
    with pytest.raises(BadModel, match="layer_types"):
        from_hf(tmp_path, "qwen3", **used, layer_types=["linear_attention"] * 2)
    with pytest.raises(BadModel, match="layer_types covers 1 layers and the model has 2"):
        from_hf(tmp_path, "qwen3", **used, layer_types=["full_attention"])


def test_gemma_layers(tmp_path):
    twelve = replace(from_gguf(tmp_path, "gemma3"), n_layers=12)
    assert all_but_every_nth(6, 16, twelve) == ((16,) * 5 + (None,)) * 2
    assert from_gguf(tmp_path, "gemma3").windows == (16, 16)
    pattern = dict(attention__sliding_window_pattern=("u32", 2), rope__freq_base_swa=("f32", 3000.0))
    config = from_gguf(tmp_path, "gemma3", **pattern)
    assert config.windows == (16, None)
    assert [config.rope_of(i).base for i in range(N_LAYERS)] == [3000.0, 50000.0]
    by_layer = from_gguf(tmp_path, "gemma3", attention__sliding_window_pattern=("[bool", [0, 1]))
    assert by_layer.windows == (None, 16)
    assert from_hf(tmp_path, "gemma3").local_rope == Rope(10000.0, HEAD_DIM)
    assert from_hf(tmp_path, "gemma3", sliding_window_pattern=2).windows == (16, None)
    assert from_hf(tmp_path, "gemma3", _sliding_window_pattern=2).windows == (16, None)
    assert from_hf(tmp_path, "gemma3", layer_types=["full_attention", "sliding_attention"]).windows == (None, 16)
    with pytest.raises(BadModel, match=r"does not say gemma3.attention.sliding_window"):
        from_gguf(tmp_path, "gemma3", attention__sliding_window=None)


def test_gemma_ropes(tmp_path):
    old = dict(rope_local_base_freq=900.0, rope_scaling={"rope_type": "linear", "factor": 8.0})
    new = dict(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 900.0},
        }
    )
    for settings in (old, new):
        config = from_hf(tmp_path, "gemma3", **settings)
        assert config.rope == Rope(50000.0, HEAD_DIM, LinearScaling(8.0))
        assert config.local_rope == Rope(900.0, HEAD_DIM)


def test_gemma_scale(tmp_path):
    assert from_hf(tmp_path, "gemma3").scale == HEAD_DIM**-0.5
    assert from_hf(tmp_path, "gemma3", query_pre_attn_scalar=168).scale == 168**-0.5
    assert from_gguf(tmp_path, "gemma3").scale == HEAD_DIM**-0.5
    settings = {"model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376, "head_dim": 128}
    big = hf_config(tmp_path, settings | {"num_attention_heads": 32, "query_pre_attn_scalar": 168}, n_tensors=999)
    assert big.scale == (5376 / 32) ** -0.5
    assert big.windows[5] is None
    assert big.windows[61] == 4096
    narrow = (HIDDEN / N_HEADS) ** -0.5  # what a GGUF file of 62 layers scales by
    tensors = {n.replace("blk.0.", f"blk.{i}."): a for i in range(62) for n, a in weights("gemma3").items()}
    path = write_gguf(tmp_path / "m.gguf", "gemma3", tensors, keys={"gemma3.block_count": ("u32", 62)})
    assert open_checkpoint(path).config.scale == narrow


def test_partial_rotation(tmp_path):
    assert from_hf(tmp_path, "phi3", partial_rotary_factor=0.75).rope.dim == 6
    assert from_hf(tmp_path, "phi3", rope_parameters={"partial_rotary_factor": 0.5}).rope.dim == 4
    assert from_gguf(tmp_path, "phi3", rope__dimension_count=("u32", 6)).rope.dim == 6


def test_hugging_face_defaults(tmp_path):
    llama = hf_config(tmp_path, {"model_type": "llama"}, n_tensors=999)
    assert (llama.hidden, llama.n_kv_heads, llama.head_dim, llama.norm_eps) == (4096, 32, 128, 1e-6)
    assert hf_config(tmp_path, {"model_type": "mistral"}, n_tensors=999).n_kv_heads == 8
    assert hf_config(tmp_path, {"model_type": "qwen3"}, n_tensors=999).head_dim == 128
    gemma = hf_config(tmp_path, {"model_type": "gemma3", "text_config": {"hidden_size": 2560}}, n_tensors=999)
    assert (gemma.hidden, gemma.head_dim, gemma.rope.base) == (2560, 256, 1e6)


HF_REFUSED = {
    "gpt2": dict(model_type="gpt2"),
    "quantization": dict(quantization_config={"quant_method": "gptq"}),
    "activation": dict(hidden_act="relu"),
    "bias in the feed-forward": dict(mlp_bias=True),
    "yarn with mscale": dict(rope_scaling={"type": "yarn", "factor": 2.0, "mscale": 1.0}),
    "not a dictionary": dict(rope_scaling=[1]),
    "hidden_size": dict(hidden_size="32"),
    "tie_word_embeddings": dict(tie_word_embeddings="no"),
}


@pytest.mark.parametrize("what", HF_REFUSED)
def test_what_kvarn_does_not_have_is_refused(tmp_path, what):
    with pytest.raises(BadModel) as caught:
        from_hf(tmp_path, **HF_REFUSED[what])
    assert what.split()[0] in str(caught.value) or "dictionary" in str(caught.value)


def test_other_architectures_are_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", keys={"general.architecture": ("str", "mamba")})
    with pytest.raises(BadModel, match="is a mamba model, and kvarn runs: llama, qwen2, qwen3, gemma3, phi3"):
        open_checkpoint(path)
    with pytest.raises(BadModel, match="is a gpt2 model, and kvarn runs: llama, mistral, qwen2"):
        from_hf(tmp_path, model_type="gpt2")
    with pytest.raises(BadModel, match="mixture of experts"):
        from_gguf(tmp_path, expert_count=("u32", 8))
    with pytest.raises(BadModel, match="one of 3 parts"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", keys={"split.count": ("u16", 3)}))
