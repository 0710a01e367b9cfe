"""stories15M, a llama2.c checkpoint, as the two kinds of file that kvarn reads.

llama2.c rotates adjacent pairs, as GGUF's llama does; a Hugging Face folder has rows for pairs (i, i + dim/2).
"""

import json
import struct
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

FIELDS = ("hidden", "feed_forward", "layers", "heads", "kv_heads", "vocab", "context")


def read(path: Path) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """Shape and tensors, under GGUF's names and in its row order."""
    data = path.read_bytes()
    shape = dict(zip(FIELDS, struct.unpack("<7i", data[:28]), strict=True))
    assert shape["vocab"] > 0, "a shared output matrix"
    weights = np.frombuffer(data, np.float32, offset=28)
    n, hidden, ff = shape["layers"], shape["hidden"], shape["feed_forward"]
    kv = hidden // shape["heads"] * shape["kv_heads"]
    order = [
        ("attn_norm", (n, hidden)),
        ("attn_q", (n, hidden, hidden)),
        ("attn_k", (n, kv, hidden)),
        ("attn_v", (n, kv, hidden)),
        ("attn_output", (n, hidden, hidden)),
        ("ffn_norm", (n, hidden)),
        ("ffn_gate", (n, ff, hidden)),
        ("ffn_down", (n, hidden, ff)),
        ("ffn_up", (n, ff, hidden)),
    ]
    at = shape["vocab"] * hidden
    tensors = {"token_embd.weight": weights[:at].reshape(-1, hidden)}
    for name, dims in order:
        size = int(np.prod(dims))
        for layer, part in enumerate(weights[at : at + size].reshape(dims)):
            tensors[f"blk.{layer}.{name}.weight"] = part
        at += size
    tensors["output_norm.weight"] = weights[at : at + hidden]
    return shape, tensors


def write_gguf(
    checkpoint: Path,
    vocabulary: Path,
    out: Path,
    template: str | None = None,
    control: dict[int, str] | None = None,
    context: int | None = None,
) -> Path:
    """With the vocabulary of another GGUF file: Llama 2's, which it was trained with. `control`: tokens that become
    control tokens of these names. `context`: more than it was trained for."""
    shape, tensors = read(checkpoint)
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_context_length(context or shape["context"])
    writer.add_embedding_length(shape["hidden"])
    writer.add_block_count(shape["layers"])
    writer.add_feed_forward_length(shape["feed_forward"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(shape["hidden"] // shape["heads"])
    fields = gguf.GGUFReader(vocabulary).fields
    for key, field in fields.items():
        if key.startswith("tokenizer.") and not (template and key == "tokenizer.chat_template"):
            kinds, value = field.types, field.contents()
            for id, name in (control or {}).items():
                if key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
                    value[id] = name if key.endswith("tokens") else gguf.TokenType.CONTROL
            sub_type = kinds[1] if kinds[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, value, kinds[0], sub_type)
    if template:
        writer.add_chat_template(template)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def write_folder(checkpoint: Path, out: Path) -> Path:
    """As on the Hugging Face hub, in two shards, f32."""
    shape, tensors = read(checkpoint)
    out.mkdir(exist_ok=True)
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_up": "mlp.up_proj",
    }
    renamed = {
        "model.embed_tokens.weight": tensors.pop("token_embd.weight"),
        "model.norm.weight": tensors.pop("output_norm.weight"),
    }
    for name, tensor in tensors.items():
        _, layer, kind, _ = name.split(".")
        if kind in ("attn_q", "attn_k"):
            heads = shape["heads"] if kind == "attn_q" else shape["kv_heads"]
            tensor = tensor.reshape(heads, -1, 2, tensor.shape[-1]).swapaxes(1, 2).reshape(tensor.shape)
        renamed[f"model.layers.{layer}.{names[kind]}.weight"] = tensor
    keys = sorted(renamed)
    shards = {"model-00001-of-00002.safetensors": keys[::2], "model-00002-of-00002.safetensors": keys[1::2]}
    for file, held in shards.items():
        save_file({key: np.ascontiguousarray(renamed[key]) for key in held}, out / file)
    index = {key: file for file, held in shards.items() for key in held}
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["feed_forward"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "vocab_size": shape["vocab"],
        "max_position_embeddings": shape["context"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    }
    (out / "config.json").write_text(json.dumps(config))
    return out
