"""Llama 1 to 3, Mistral, SmolLM2, TinyLlama. Other families reuse parts of this file."""

from collections.abc import Callable
from typing import Any

from kvarn.graph.ops import Centre, Ops, V
from kvarn.models.config import ModelConfig
from kvarn.models.family import Family, GGUFRules, HFRules
from kvarn.models.tensors import Tensor, matrix, norm, optional_bias


def forward(ops: Ops[V], config: ModelConfig) -> V:
    return decoder(ops, config, attention)


def decoder(ops: Ops[V], config: ModelConfig, attention: Callable[[Ops[V], ModelConfig, int, V], V]) -> V:
    """Norm, attention, norm, feed-forward; each half is added to its input."""
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
    if ops.has(bias := block + "k.bias"):
        k = ops.centred(k, config.n_kv_heads, Centre(bias, rope, config.context))
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
    """Final norm and logits. A file without an output matrix ties it to the embedding."""
    x = ops.rms_norm(x, "output_norm.weight")
    return ops.logits(x, "output.weight" if ops.has("output.weight") else "token_embd.weight")


def layer(c: ModelConfig) -> dict[str, Tensor]:
    return {
        "attn_norm.weight": norm(c.hidden, "input_layernorm"),
        "attn_q.weight": matrix(c.q_width, c.hidden, "self_attn.q_proj", rotated_heads=c.n_heads),
        "attn_k.weight": matrix(c.kv_width, c.hidden, "self_attn.k_proj", rotated_heads=c.n_kv_heads),
        "attn_v.weight": matrix(c.kv_width, c.hidden, "self_attn.v_proj"),
        "attn_output.weight": matrix(c.hidden, c.q_width, "self_attn.o_proj"),
        "attn_q.bias": optional_bias(c.q_width, "self_attn.q_proj", rotated_heads=c.n_heads),
        "attn_k.bias": optional_bias(c.kv_width, "self_attn.k_proj", rotated_heads=c.n_kv_heads),
        "attn_v.bias": optional_bias(c.kv_width, "self_attn.v_proj"),
        "attn_output.bias": optional_bias(c.hidden, "self_attn.o_proj"),
        "ffn_norm.weight": norm(c.hidden, "post_attention_layernorm"),
        "ffn_gate.weight": matrix(c.feed_forward, c.hidden, "mlp.gate_proj"),
        "ffn_up.weight": matrix(c.feed_forward, c.hidden, "mlp.up_proj"),
        "ffn_down.weight": matrix(c.hidden, c.feed_forward, "mlp.down_proj"),
    }


HF_DEFAULTS: dict[str, Any] = dict(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    hidden_act="silu",
)
MISTRAL_DEFAULTS = HF_DEFAULTS | dict(
    intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096
)

FAMILY = Family(
    name="llama",
    forward=forward,
    layer=layer,
    gguf=GGUFRules(adjacent_pairs=True),
    hf=HFRules(model_types={"llama": HF_DEFAULTS, "mistral": MISTRAL_DEFAULTS}),
)
