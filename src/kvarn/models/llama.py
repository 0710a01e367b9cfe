"""Llama 1 to 3, Mistral, SmolLM2, TinyLlama."""

from collections.abc import Callable

from kvarn.graph.ops import Ops, V
from kvarn.models.config import ModelConfig


def forward(ops: Ops[V], config: ModelConfig) -> V:
    return decoder(ops, config, attention)


def decoder(ops: Ops[V], config: ModelConfig, attention: Callable[[Ops[V], ModelConfig, int, V], V]) -> V:
    """Norm, attention, norm, feed-forward, each half added to what came in: the shape most families share."""
    x = ops.embed("token_embd.weight")
    for layer in range(config.n_layers):
        block = f"blk.{layer}."
        x = ops.add(x, attention(ops, config, layer, ops.rms_norm(x, block + "attn_norm.weight")))
        x = ops.add(x, feed_forward(ops, layer, ops.rms_norm(x, block + "ffn_norm.weight")))
    return output(ops, x)


def attention(ops: Ops[V], config: ModelConfig, layer: int, h: V) -> V:
    block = f"blk.{layer}.attn_"
    rope = config.rope_of(layer)
    q = ops.rope(project(ops, h, block + "q"), config.n_heads, rope)
    k = ops.rope(project(ops, h, block + "k"), config.n_kv_heads, rope)
    v = project(ops, h, block + "v")
    return project(ops, ops.attention(layer, q, k, v, config.scale), block + "output")


def project(ops: Ops[V], x: V, name: str) -> V:
    """A linear layer, with its bias where the file has one."""
    bias = f"{name}.bias"
    return ops.linear(x, f"{name}.weight", bias if ops.has(bias) else None)


def feed_forward(ops: Ops[V], layer: int, h: V) -> V:
    block = f"blk.{layer}.ffn_"
    gate, up = ops.linear(h, block + "gate.weight"), ops.linear(h, block + "up.weight")
    return ops.linear(ops.gated(gate, up, "silu"), block + "down.weight")


def output(ops: Ops[V], x: V) -> V:
    """Final norm and logits; a file without an output matrix ties it to the embedding."""
    x = ops.rms_norm(x, "output_norm.weight")
    return ops.logits(x, "output.weight" if ops.has("output.weight") else "token_embd.weight")
