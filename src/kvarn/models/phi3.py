"""Phi-3 and Phi-4: like Llama, but files store q, k and v as one tensor, and gate and up as one tensor."""

from kvarn.models import llama
from kvarn.models.family import Family, HFRules
from kvarn.models.tensors import Fused

HF_DEFAULTS = llama.HF_DEFAULTS | dict(
    vocab_size=32064, hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096, rms_norm_eps=1e-5
)

FAMILY = Family(
    name="phi3",
    forward=llama.forward,
    layer=llama.layer,
    fused=(
        Fused(("attn_q", "attn_k", "attn_v"), gguf="attn_qkv", hf="self_attn.qkv_proj"),
        Fused(("ffn_gate", "ffn_up"), gguf="ffn_up", hf="mlp.gate_up_proj"),
    ),
    hf=HFRules(model_types={"phi3": HF_DEFAULTS}),
)
