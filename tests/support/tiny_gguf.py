"""Writes tiny random GGUF models, one per architecture and rope scaling, the same bytes each time.

Used by the tests and by scripts/golden_tiny.py, which runs the same files through llama.cpp.
"""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

LAYERS, HEADS, KV, DIM, HIDDEN, FF, CONTEXT = 3, 4, 2, 32, 128, 96, 256
VOCAB = 256 + 3
VARIANTS = (
    "llama",
    "llama-linear",
    "llama-llama3",
    "llama-yarn",
    "qwen2",
    "qwen3",
    "gemma3",
    "phi3",
)


def byte_tokens() -> list[str]:
    """GPT-2's printable names of the 256 bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return [chr(b) if b in shown else chr(256 + hidden.index(b)) for b in range(256)]


CHAT = """{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def write(
    path: Path,
    variant: str,
    chat_template: str | None = None,
    context: int = CONTEXT,
    draw: Callable[[tuple[int, ...]], np.ndarray] | None = None,
) -> Path:
    """`draw` gives weights of a shape, of variance 1; without it they are normal."""
    architecture, _, scaling = variant.partition("-")
    rng = np.random.default_rng(sum(map(ord, variant)))
    draw = draw or rng.standard_normal
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")  # llama.cpp treats some names (phi-3) in a way of their own
    writer.add_context_length(context)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_key_length(DIM)
    writer.add_value_length(DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(DIM)
    _scaling(writer, scaling, rng)
    if architecture == "gemma3":
        writer.add_sliding_window(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    if chat_template is None:
        writer.add_token_list([*byte_tokens(), "<|endoftext|>", "</s>", "<unk>"])
        writer.add_token_types([1] * 256 + [3, 3, 3])
    else:  # a vocabulary that can encode text: what the merges make is in it
        writer.add_token_list([*byte_tokens(), "<|endoftext|>", "ab", "cd"])
        writer.add_token_types([1] * 256 + [3, 1, 1])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, shape in shapes(architecture):
        spread = 0.1 if "norm" in name else 1.5 * shape[-1] ** -0.5
        values = draw(shape) * spread + (1 if "norm" in name else 0)
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _scaling(writer: gguf.GGUFWriter, scaling: str, rng: np.random.Generator) -> None:
    if scaling == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
    elif scaling == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
    elif scaling == "llama3":
        factors = np.linspace(1.0, 8.0, DIM // 2).astype(np.float32)
        writer.add_tensor("rope_freqs.weight", factors)


def shapes(architecture: str) -> list[tuple[str, tuple[int, ...]]]:
    found: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (VOCAB, HIDDEN))]
    found.append(("output_norm.weight", (HIDDEN,)))
    if architecture != "gemma3":
        found.append(("output.weight", (VOCAB, HIDDEN)))
    for i in range(LAYERS):
        block = f"blk.{i}."
        found += [(block + "attn_norm.weight", (HIDDEN,)), (block + "ffn_norm.weight", (HIDDEN,))]
        found += [(block + "attn_output.weight", (HIDDEN, HEADS * DIM)), (block + "ffn_down.weight", (HIDDEN, FF))]
        if architecture == "phi3":
            found += [(block + "attn_qkv.weight", ((HEADS + 2 * KV) * DIM, HIDDEN))]
            found += [(block + "ffn_up.weight", (2 * FF, HIDDEN))]
        else:
            for name, rows in (("q", HEADS), ("k", KV), ("v", KV)):
                found.append((f"{block}attn_{name}.weight", (rows * DIM, HIDDEN)))
                if architecture == "qwen2":
                    found.append((f"{block}attn_{name}.bias", (rows * DIM,)))
            found += [(block + "ffn_gate.weight", (FF, HIDDEN)), (block + "ffn_up.weight", (FF, HIDDEN))]
        if architecture in ("qwen3", "gemma3"):
            found += [(block + "attn_q_norm.weight", (DIM,)), (block + "attn_k_norm.weight", (DIM,))]
        if architecture == "gemma3":
            found += [(block + "post_attention_norm.weight", (HIDDEN,)), (block + "post_ffw_norm.weight", (HIDDEN,))]
    return found


def tokens(variant: str) -> list[int]:
    return np.random.default_rng(len(variant)).integers(0, 256, 60).tolist()
