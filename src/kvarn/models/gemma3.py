"""Gemma 3: local and global layers (a window and a rope base of their own), norms before and after each half of a
layer, queries and keys normalized per head, embeddings scaled by sqrt(hidden), gelu."""

from kvarn.graph.ops import Ops, V
from kvarn.models.config import ModelConfig
from kvarn.models.llama import output
from kvarn.models.qwen3 import attention


def forward(ops: Ops[V], config: ModelConfig) -> V:
    x = ops.embed("token_embd.weight", config.hidden**0.5)
    for layer in range(config.n_layers):
        block = f"blk.{layer}."
        h = attention(ops, config, layer, ops.rms_norm(x, block + "attn_norm.weight"))
        x = ops.add(x, ops.rms_norm(h, block + "post_attention_norm.weight"))
        h = feed_forward(ops, layer, ops.rms_norm(x, block + "ffn_norm.weight"))
        x = ops.add(x, ops.rms_norm(h, block + "post_ffw_norm.weight"))
    return output(ops, x)


def feed_forward(ops: Ops[V], layer: int, h: V) -> V:
    block = f"blk.{layer}.ffn_"
    gate, up = ops.linear(h, block + "gate.weight"), ops.linear(h, block + "up.weight")
    return ops.linear(ops.gated(gate, up, "gelu"), block + "down.weight")
