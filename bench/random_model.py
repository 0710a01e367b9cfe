"""Writes a GGUF file with random weights in the shape of a well-known model: speed does not depend on their values.

    python bench/random_model.py 8B Q4_K_M model.gguf

A few megabytes of random rows are repeated, so that writing is as fast as the disk.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Shape:
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden: int
    feed_forward: int
    vocab_size: int
    rope_base: float

    @property
    def head_dim(self) -> int:
        return self.hidden // self.n_heads


SHAPES = {
    "tiny": Shape(2, 4, 2, 256, 512, 1000, 10_000.0),
    "1.1B": Shape(22, 32, 4, 2048, 5632, 32_000, 10_000.0),
    "8B": Shape(32, 32, 8, 4096, 14_336, 128_256, 500_000.0),
}
CONTEXT = 40_960
MIXES = ("F16", "BF16", "Q8_0", "Q4_K_M")
POOL = 32 << 20  # bytes of random rows
SPREAD = 0.02  # standard deviation of weights, about


def stored_type(mix: str, name: str, layer: int, n_layers: int) -> Type:
    """As llama.cpp's Q4_K_M: a half of the most sensitive matrices, and the logits, have six bits."""
    if mix != "Q4_K_M":
        return Type[mix]
    if name == "output":
        return Type.Q6_K
    sensitive = name in ("attn_v", "ffn_down")
    more = layer < n_layers // 8 or layer >= 7 * n_layers // 8 or (layer - n_layers // 8) % 3 == 2
    return Type.Q6_K if sensitive and more else Type.Q4_K


def random_rows(kind: Type, width: int, random: np.random.Generator) -> Bytes:
    """Some rows as they are stored."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    row_bytes = width // gguf.GGML_QUANT_SIZES[kind][0] * block_bytes
    n_rows = max(1, POOL // row_bytes)
    if kind in (Type.F16, Type.BF16):
        numbers = SPREAD * random.standard_normal((n_rows, width), np.float32)
        bits = numbers.astype(np.float16).view(np.uint16) if kind == Type.F16 else numbers.view(np.uint32) >> 16
        return bits.astype(np.uint16).view(np.uint8)
    blocks = random.integers(0, 256, (n_rows * row_bytes // block_bytes, block_bytes), np.uint8)
    scales = {  # offset of an f16 in a block: its value
        Type.Q8_0: {0: SPREAD / 74},
        Type.Q4_K: {0: SPREAD / 180, 2: SPREAD / 24},  # codes of 0 to 15 times scales of 0 to 63, less a minimum
        Type.Q6_K: {208: SPREAD / 1400},  # codes of -32 to 31 times scales of -128 to 127
    }[kind]
    for offset, scale in scales.items():
        blocks[:, offset : offset + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(n_rows, row_bytes)


def tensors(shape: Shape) -> list[tuple[str, int, int, int]]:
    """(name, layer, rows, width); of norms the width is 0."""
    wide, narrow = shape.hidden, shape.n_kv_heads * shape.head_dim
    found = [("token_embd", -1, shape.vocab_size, shape.hidden), ("output", -1, shape.vocab_size, shape.hidden)]
    found.append(("output_norm", -1, shape.hidden, 0))
    for layer in range(shape.n_layers):
        found += [
            ("attn_norm", layer, shape.hidden, 0),
            ("attn_q", layer, wide, shape.hidden),
            ("attn_k", layer, narrow, shape.hidden),
            ("attn_v", layer, narrow, shape.hidden),
            ("attn_output", layer, shape.hidden, wide),
            ("ffn_norm", layer, shape.hidden, 0),
            ("ffn_gate", layer, shape.feed_forward, shape.hidden),
            ("ffn_up", layer, shape.feed_forward, shape.hidden),
            ("ffn_down", layer, shape.hidden, shape.feed_forward),
        ]
    return found


def write(path: Path, name: str, mix: str) -> Path:
    shape, random = SHAPES[name], np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    _add_settings(writer, shape, f"random {name} {mix}")
    plan = []
    for part, layer, n_rows, width in tensors(shape):
        full = f"{part}.weight" if layer < 0 else f"blk.{layer}.{part}.weight"
        if not width:
            writer.add_tensor_info(full, [n_rows], np.dtype(np.float32), 4 * n_rows)
            plan.append((None, n_rows, 0))
            continue
        kind = stored_type(mix, part, layer, shape.n_layers)
        size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = width // size * block_bytes
        writer.add_tensor_info(full, [n_rows, row_bytes], np.dtype(np.uint8), n_rows * row_bytes, kind)
        plan.append((kind, n_rows, width))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pools: dict[tuple[Type, int], Bytes] = {}
    for kind, n_rows, width in plan:
        if kind is None:
            writer.write_tensor_data(np.ones(n_rows, np.float32))
            continue
        if (kind, width) not in pools:
            pools[kind, width] = random_rows(kind, width, random)
        rows = pools[kind, width]
        writer.write_tensor_data(np.resize(rows, (n_rows, rows.shape[1])))
    writer.close()
    return path


def _add_settings(writer: gguf.GGUFWriter, shape: Shape, name: str) -> None:
    writer.add_name(name)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_dim)
    special = ["<unk>", "<s>", "</s>"]
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [f"\u2581w{i}" for i in range(shape.vocab_size - len(special) - len(letters))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *letters, *words])
    writer.add_token_scores([0.0] * (len(special) + len(letters)) + [-float(i) for i in range(len(words))])
    kinds = gguf.TokenType
    writer.add_token_types(
        [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * len(letters), *[kinds.NORMAL] * len(words)]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("weights", choices=MIXES)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    write(args.file, args.shape, args.weights)
    print(f"{args.file}: {args.file.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
