"""Qwen3: queries and keys are normalized per head before they are rotated."""

from kvarn.graph.ops import Ops, V
from kvarn.models.config import ModelConfig
from kvarn.models.llama import decoder, project


def forward(ops: Ops[V], config: ModelConfig) -> V:
    return decoder(ops, config, attention)


def attention(ops: Ops[V], config: ModelConfig, layer: int, h: V) -> V:
    block = f"blk.{layer}.attn_"
    rope = config.rope_of(layer)
    q = ops.rms_norm(project(ops, h, block + "q"), block + "q_norm.weight", config.n_heads)
    k = ops.rms_norm(project(ops, h, block + "k"), block + "k_norm.weight", config.n_kv_heads)
    q, k = ops.rope(q, config.n_heads, rope), ops.rope(k, config.n_kv_heads, rope)
    v = project(ops, h, block + "v")
    return project(ops, ops.attention(layer, q, k, v, config.scale), block + "output")
