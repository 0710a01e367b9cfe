"""Qwen3: like Llama, but queries and keys are normalized per head before rope rotates them."""

from kvarn.graph.ops import Ops, V
from kvarn.models import llama, qwen2
from kvarn.models.config import ModelConfig
from kvarn.models.family import Family, HFRules
from kvarn.models.llama import decoder, project
from kvarn.models.tensors import Tensor, norm


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


def layer(c: ModelConfig) -> dict[str, Tensor]:
    return llama.layer(c) | {
        "attn_q_norm.weight": norm(c.head_dim, "self_attn.q_norm"),
        "attn_k_norm.weight": norm(c.head_dim, "self_attn.k_norm"),
    }


FAMILY = Family(
    name="qwen3",
    forward=forward,
    layer=layer,
    gguf=qwen2.GGUF,
    hf=HFRules(model_types={"qwen3": qwen2.HF_DEFAULTS | dict(head_dim=128)}, windows=qwen2.windows),
)
