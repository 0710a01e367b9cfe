"""Qwen3: queries and keys are normalized per head before they are rotated."""

from kvarn.backends.ops import Ops, V
from kvarn.models.config import ModelConfig
from kvarn.models.llama import feed_forward, output, project


def forward(ops: Ops[V], config: ModelConfig) -> V:
    x = ops.embed("token_embd.weight")
    for layer in range(config.n_layers):
        block = f"blk.{layer}."
        x = ops.add(x, attention(ops, config, layer, ops.rms_norm(x, block + "attn_norm.weight")))
        x = ops.add(x, feed_forward(ops, layer, ops.rms_norm(x, block + "ffn_norm.weight")))
    return output(ops, x)


def attention(ops: Ops[V], config: ModelConfig, layer: int, h: V) -> V:
    block = f"blk.{layer}.attn_"
    rope = config.rope_of(layer)
    q = ops.rms_norm(project(ops, h, block + "q"), block + "q_norm.weight", config.n_heads)
    k = ops.rms_norm(project(ops, h, block + "k"), block + "k_norm.weight", config.n_kv_heads)
    q, k = ops.rope(q, config.n_heads, rope), ops.rope(k, config.n_kv_heads, rope)
    v = project(ops, h, block + "v")
    return project(ops, ops.attention(layer, q, k, v, config.scale), block + "output")
