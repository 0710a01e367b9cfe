"""Tiny models of every architecture with random weights, written as GGUF and as Hugging Face folders.

The weights are made in canonical form; each writer does to them what the converters and the hub's files do. Non-goals:
sensible text.
"""

import json
import struct
from pathlib import Path

import numpy as np
from support.gguf_writer import TYPE_IDS, Tensor, gguf

N_LAYERS, N_HEADS, N_KV_HEADS, HEAD_DIM, HIDDEN, FEED_FORWARD, VOCAB, CONTEXT = 2, 4, 2, 8, 32, 64, 48, 128
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "phi3")
WIDE, NARROW = N_HEADS * HEAD_DIM, N_KV_HEADS * HEAD_DIM


def weights(architecture: str, *, tied: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Canonical tensors, of numbers that F16 and BF16 hold exactly."""
    random = np.random.default_rng(seed)

    def some(*shape: int) -> np.ndarray:
        return (random.integers(-128, 128, shape) / 64).astype(np.float32)

    found = {"token_embd.weight": some(VOCAB, HIDDEN), "output_norm.weight": some(HIDDEN)}
    head = some(VOCAB, HIDDEN)  # drawn in any case: tying changes no other tensor
    if not tied:
        found["output.weight"] = head
    for i in range(N_LAYERS):
        layer = {
            "attn_norm.weight": some(HIDDEN),
            "attn_q.weight": some(WIDE, HIDDEN),
            "attn_k.weight": some(NARROW, HIDDEN),
            "attn_v.weight": some(NARROW, HIDDEN),
            "attn_output.weight": some(HIDDEN, WIDE),
            "ffn_norm.weight": some(HIDDEN),
            "ffn_gate.weight": some(FEED_FORWARD, HIDDEN),
            "ffn_up.weight": some(FEED_FORWARD, HIDDEN),
            "ffn_down.weight": some(HIDDEN, FEED_FORWARD),
        }
        if architecture in ("llama", "qwen2"):  # llama may, qwen2 must
            layer |= {"attn_q.bias": some(WIDE), "attn_k.bias": some(NARROW), "attn_v.bias": some(NARROW)}
        if architecture in ("qwen3", "gemma3"):
            layer |= {"attn_q_norm.weight": some(HEAD_DIM), "attn_k_norm.weight": some(HEAD_DIM)}
        if architecture == "gemma3":
            layer |= {"post_attention_norm.weight": some(HIDDEN), "post_ffw_norm.weight": some(HIDDEN)}
        found |= {f"blk.{i}.{part}": array for part, array in layer.items()}
    return found


def paired(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """What the GGUF converter does to llama's queries and keys."""
    shape = rows.shape
    return rows.reshape(n_heads, 2, shape[0] // n_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def fuse(tensors: dict[str, np.ndarray], parts: list[str], name: str) -> None:
    for i in range(N_LAYERS):
        tensors[f"blk.{i}.{name}"] = np.concatenate([tensors.pop(f"blk.{i}.{part}") for part in parts])


def gguf_keys(architecture: str) -> dict[str, tuple[str, object]]:
    a = architecture
    keys: dict[str, tuple[str, object]] = {
        "general.architecture": ("str", a),
        "general.name": ("str", f"tiny {a}"),
        f"{a}.block_count": ("u32", N_LAYERS),
        f"{a}.context_length": ("u32", CONTEXT),
        f"{a}.embedding_length": ("u32", HIDDEN),
        f"{a}.feed_forward_length": ("u32", FEED_FORWARD),
        f"{a}.attention.head_count": ("u32", N_HEADS),
        f"{a}.attention.head_count_kv": ("u32", N_KV_HEADS),
        f"{a}.attention.layer_norm_rms_epsilon": ("f32", 2.0**-20),
        f"{a}.rope.freq_base": ("f32", 50000.0),
        f"{a}.rope.dimension_count": ("u32", HEAD_DIM),
    }
    if a == "gemma3":
        keys |= {f"{a}.attention.key_length": ("u32", HEAD_DIM), f"{a}.attention.value_length": ("u32", HEAD_DIM)}
        keys |= {f"{a}.attention.sliding_window": ("u32", 16)}
    return keys


def write_gguf(path: Path, architecture: str, tensors=None, *, keys=None, type_name: str = "F32", drop=()) -> Path:
    """`keys` are added or, with None, left out; matrices are stored as `type_name`; `drop` leaves tensors out."""
    stored = dict(weights(architecture) if tensors is None else tensors)
    if architecture == "llama":
        for name, array in stored.items():
            heads = N_HEADS if ".attn_q." in name else N_KV_HEADS if ".attn_k." in name else 0
            stored[name] = paired(array, heads) if heads else array
    if architecture == "phi3":
        fuse(stored, ["attn_q.weight", "attn_k.weight", "attn_v.weight"], "attn_qkv.weight")
        fuse(stored, ["ffn_gate.weight", "ffn_up.weight"], "ffn_up.weight")
    settings = {k: v for k, v in (gguf_keys(architecture) | (keys or {})).items() if v is not None}
    entries = [_tensor(n, a, type_name if a.ndim == 2 else "F32") for n, a in stored.items() if n not in drop]
    path.write_bytes(gguf([(k, *v) for k, v in settings.items()], entries))
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
HF_GEMMA_PARTS = HF_PARTS | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def hf_settings(architecture: str) -> dict[str, object]:
    found: dict[str, object] = {
        "model_type": "gemma3_text" if architecture == "gemma3" else architecture,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": N_HEADS,
        "num_key_value_heads": N_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 2.0**-20,
        "rope_theta": 50000.0,
        "tie_word_embeddings": False,
    }
    if architecture == "gemma3":
        found |= {"sliding_window": 16, "query_pre_attn_scalar": HEAD_DIM}
    return found


def hf_name(architecture: str, name: str, prefix: str = "model.") -> str:
    top = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}
    if name == "output.weight":
        return "lm_head.weight"
    if name in top:
        return prefix + top[name]
    _, i, part, suffix = name.split(".")
    return f"{prefix}layers.{i}.{(HF_GEMMA_PARTS if architecture == 'gemma3' else HF_PARTS)[part]}.{suffix}"


def write_hf(folder: Path, architecture: str, tensors=None, *, settings=None, dtype="F32", shards=1, drop=()) -> Path:
    stored = dict(weights(architecture) if tensors is None else tensors)
    if architecture == "gemma3":
        stored = {n: a - 1 if "norm" in n else a for n, a in stored.items()}
    if architecture == "phi3":
        fuse(stored, ["attn_q.weight", "attn_k.weight", "attn_v.weight"], "attn_qkv.weight")
        fuse(stored, ["ffn_gate.weight", "ffn_up.weight"], "ffn_gate_up.weight")
    named = {hf_name(architecture, n): a for n, a in stored.items()}
    named = {n: a for n, a in named.items() if n not in drop}
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
