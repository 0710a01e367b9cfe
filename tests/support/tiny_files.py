"""Writes tiny models as GGUF files and as Hugging Face folders.

Weights come in canonical form. Each writer does to them what llama.cpp's converter, or the training
code that published the folder, does: pairs of rows, fused tensors, norms minus one, other names.
Non-goals: valid files only (tests change keys, drop tensors and add wrong ones).
"""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from support.gguf_writer import TYPE_IDS, Tensor, gguf
from support.tiny_models import LOADING, Size, weights

T = TypeVar("T")
ADJACENT_PAIRS = ("llama",)
FUSED = {"phi3": {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up": ("ffn_gate", "ffn_up")}}
GGUF_NAMES = {"ffn_gate_up": "ffn_up"}  # of fused tensors, where they differ from ours
NORMS_MINUS_ONE = ("gemma3",)
HF_TYPES = {"gemma3": "gemma3_text"}  # where they differ from GGUF's name
HF_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_gate_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
HF_OTHER_PARTS = {
    "gemma3": {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
}
Keys = dict[str, tuple[str, Any]]  # key: (kind, content)


# -- what files do to canonical tensors --------------------------------------------------------------------------------


def fuse(architecture: str, tensors: Mapping[str, T], join: Callable[[list[T]], T] = np.concatenate) -> dict[str, T]:
    """Each fused tensor stands where its first part was."""
    fused = FUSED.get(architecture, {})
    found: dict[str, T] = {}
    for name, tensor in tensors.items():
        block, _, part = name.removesuffix(".weight").rpartition(".")
        whole = next((whole for whole, parts in fused.items() if part in parts), None)
        if whole is None:
            found[name] = tensor
        elif part == fused[whole][0]:
            found[f"{block}.{whole}.weight"] = join([tensors[f"{block}.{each}.weight"] for each in fused[whole]])
    return found


def in_gguf(architecture: str, tensors: Mapping[str, T], join: Callable[[list[T]], T] = np.concatenate) -> dict[str, T]:
    """Tensors by the names that GGUF has for them."""
    found = {}
    for name, tensor in fuse(architecture, tensors, join).items():
        for ours, stored in GGUF_NAMES.items():
            name = name.replace(f".{ours}.", f".{stored}.")
        found[name] = tensor
    return found


def paired(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """What the GGUF converter does to llama's queries and keys."""
    shape = rows.shape
    return rows.reshape(n_heads, 2, shape[0] // n_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def hf_name(architecture: str, name: str, prefix: str = "model.") -> str:
    top = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}
    if name == "output.weight":
        return "lm_head.weight"
    if name in top:
        return prefix + top[name]
    _, i, part, suffix = name.split(".")
    return f"{prefix}layers.{i}.{(HF_PARTS | HF_OTHER_PARTS.get(architecture, {}))[part]}.{suffix}"


# -- GGUF files --------------------------------------------------------------------------------------------------------


def gguf_keys(architecture: str, size: Size = LOADING, name: str | None = None) -> Keys:
    a = architecture
    keys: Keys = {
        "general.architecture": ("str", a),
        "general.name": ("str", name or f"tiny {a}"),
        f"{a}.context_length": ("u32", size.context),
        f"{a}.embedding_length": ("u32", size.hidden),
        f"{a}.block_count": ("u32", size.n_layers),
        f"{a}.feed_forward_length": ("u32", size.feed_forward),
        f"{a}.attention.head_count": ("u32", size.n_heads),
        f"{a}.attention.head_count_kv": ("u32", size.n_kv_heads),
        f"{a}.attention.key_length": ("u32", size.head_dim),
        f"{a}.attention.value_length": ("u32", size.head_dim),
        f"{a}.attention.layer_norm_rms_epsilon": ("f32", size.norm_eps),
        f"{a}.rope.freq_base": ("f32", size.rope_base),
        f"{a}.rope.dimension_count": ("u32", size.head_dim),
    }
    return keys


def local_keys(architecture: str, size: Size) -> Keys:
    return {f"{architecture}.attention.sliding_window": ("u32", size.window)} if architecture == "gemma3" else {}


def write_gguf(
    path: Path, architecture: str, tensors=None, *, keys=None, type_name="F32", drop=(), called: str | None = None
) -> Path:
    """`keys` are added or, with None, left out. Matrices are stored as `type_name`. `drop` leaves
    tensors out. `called` is another name for the architecture."""
    stored = dict(weights(architecture) if tensors is None else tensors)
    if architecture in ADJACENT_PAIRS:
        heads = {"attn_q": LOADING.n_heads, "attn_k": LOADING.n_kv_heads}
        for name, array in stored.items():
            part = name.split(".")[-2]
            stored[name] = paired(array, heads[part]) if part in heads else array
    given = gguf_keys(called or architecture) | local_keys(architecture, LOADING) | (keys or {})
    entries = [
        _tensor(name, array, type_name if array.ndim == 2 else "F32")
        for name, array in in_gguf(architecture, stored).items()
        if name not in drop
    ]
    path.write_bytes(gguf([(key, *value) for key, value in given.items() if value is not None], entries))
    return path


def _tensor(name: str, array: np.ndarray, type_name: str) -> Tensor:
    return Tensor(name, encode(array, type_name), tuple(reversed(array.shape)), TYPE_IDS[type_name])


def encode(array: np.ndarray, type_name: str) -> bytes:
    array = np.ascontiguousarray(array, np.float32)
    if type_name == "BF16":
        return (array.view(np.uint32) >> 16).astype("<u2").tobytes()
    if type_name in ("F32", "F16"):
        return array.astype({"F32": "<f4", "F16": "<f2"}[type_name]).tobytes()
    import gguf as package

    return package.quants.quantize(array, package.GGMLQuantizationType[type_name]).tobytes()


# -- Hugging Face folders ----------------------------------------------------------------------------------------------


def hf_settings(architecture: str, size: Size = LOADING) -> dict[str, object]:
    found: dict[str, object] = {
        "model_type": HF_TYPES.get(architecture, architecture),
        "num_hidden_layers": size.n_layers,
        "num_attention_heads": size.n_heads,
        "num_key_value_heads": size.n_kv_heads,
        "head_dim": size.head_dim,
        "hidden_size": size.hidden,
        "intermediate_size": size.feed_forward,
        "vocab_size": size.vocab_size,
        "max_position_embeddings": size.context,
        "rms_norm_eps": size.norm_eps,
        "rope_theta": size.rope_base,
        "tie_word_embeddings": False,
    }
    if architecture == "gemma3":
        found |= {"sliding_window": size.window, "query_pre_attn_scalar": size.head_dim}
    return found


def write_hf(folder: Path, architecture: str, tensors=None, *, settings=None, dtype="F32", shards=1, drop=()) -> Path:
    stored = dict(weights(architecture) if tensors is None else tensors)
    if architecture in NORMS_MINUS_ONE:
        stored = {name: array - 1 if "norm" in name else array for name, array in stored.items()}
    named = {hf_name(architecture, name): array for name, array in fuse(architecture, stored).items()}
    named = {name: array for name, array in named.items() if name not in drop}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_settings(architecture) | (settings or {})))
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors(named, dtype))
        return folder
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    where = {name: files[i % shards] for i, name in enumerate(named)}
    for file in files:
        (folder / file).write_bytes(safetensors({n: a for n, a in named.items() if where[n] == file}, dtype))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def safetensors(tensors: dict[str, np.ndarray], dtype: str = "F32") -> bytes:
    header, data = {}, b""
    for name, array in tensors.items():
        raw = encode(array, dtype)
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + data
