"""Which tensor is which: canonical names, the shapes they must have, and where each lies in a file.

Canonical names are GGUF's. Canonical tensors are what models compute with: query and key rows in the order whose
rotated pairs are (i, i + dim/2), norms as the factor that multiplies, projections apart. Files differ: GGUF stores
llama's pairs adjacent, Hugging Face stores Gemma's norms less one, phi3 fuses projections. A `Piece` says how to get
from one to the other.
Non-goals: bytes (checkpoint.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvarn.errors import BadModel
from kvarn.loading.encodings import TensorInfo
from kvarn.models.config import ModelConfig

Shape = tuple[int, ...]


class Rows(NamedTuple):
    start: int
    stop: int
    of: int  # rows of the fused tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A canonical tensor as part of a stored one."""

    source: str
    rows: Rows | None = None  # None for all
    n_paired_heads: int = 0  # heads whose rotated rows are stored as adjacent pairs
    plus: float = 0.0


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a kind of file names tensors and what it does to them."""

    top: Mapping[str, str]  # canonical name: stored name
    layer: str  # with the layer's number to fill in
    parts: Mapping[str, str]  # within a layer, without .weight or .bias
    fused_attention: str
    fused_feed_forward: str
    adjacent_pairs: bool
    norm_plus: float
    ignored: tuple[str, ...] = ()  # parts of names that are no weights of the text model


_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_PARTS = _PARTS | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def gguf_spelling(architecture: str) -> Spelling:
    return Spelling(
        top={name: name for name in ("token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight")},
        layer="blk.{}.",
        parts={name: name for name in _GEMMA3_PARTS},
        fused_attention="attn_qkv",
        fused_feed_forward="ffn_up",
        adjacent_pairs=architecture == "llama",
        norm_plus=0.0,
    )


def hf_spelling(architecture: str, stored: Mapping[str, TensorInfo], tied: bool) -> Spelling:
    # "model." and, around a multimodal model's text part, one of two longer ones.
    prefix = next(
        (n.removesuffix("embed_tokens.weight") for n in stored if n.endswith("embed_tokens.weight")), "model."
    )
    head = next((n for n in stored if n.endswith("lm_head.weight")), "lm_head.weight")
    gemma = architecture == "gemma3"
    return Spelling(
        top={"token_embd.weight": f"{prefix}embed_tokens.weight", "output_norm.weight": f"{prefix}norm.weight"}
        | ({} if tied else {"output.weight": head}),
        layer=prefix + "layers.{}.",
        parts=_GEMMA3_PARTS if gemma else _PARTS,
        fused_attention="self_attn.qkv_proj",
        fused_feed_forward="mlp.gate_up_proj",
        adjacent_pairs=False,
        norm_plus=1.0 if gemma else 0.0,
        ignored=("rotary_emb.inv_freq",)
        + ((head,) if tied else ())
        + (("vision_tower.", "multi_modal_projector.") if gemma else ()),
    )


def shapes(config: ModelConfig) -> dict[str, tuple[Shape, bool]]:
    """Every tensor that the architecture may have: its shape, and whether it must be there."""
    c = config
    wide, narrow = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    qk_norm, gemma, qkv_bias = (
        c.architecture in ("qwen3", "gemma3"),
        c.architecture == "gemma3",
        c.architecture == "qwen2",
    )
    layer: dict[str, tuple[Shape, bool]] = {
        "attn_norm.weight": ((c.hidden,), True),
        "attn_q.weight": ((wide, c.hidden), True),
        "attn_k.weight": ((narrow, c.hidden), True),
        "attn_v.weight": ((narrow, c.hidden), True),
        "attn_output.weight": ((c.hidden, wide), True),
        "attn_q.bias": ((wide,), qkv_bias),
        "attn_k.bias": ((narrow,), qkv_bias),
        "attn_v.bias": ((narrow,), qkv_bias),
        "attn_output.bias": ((c.hidden,), False),
        "ffn_norm.weight": ((c.hidden,), True),
        "ffn_gate.weight": ((c.feed_forward, c.hidden), True),
        "ffn_up.weight": ((c.feed_forward, c.hidden), True),
        "ffn_down.weight": ((c.hidden, c.feed_forward), True),
    }
    if qk_norm:
        layer |= {f"attn_{x}_norm.weight": ((c.head_dim,), True) for x in "qk"}
    if gemma:
        layer |= {f"post_{x}_norm.weight": ((c.hidden,), True) for x in ("attention", "ffw")}
    return {
        "token_embd.weight": ((c.vocab_size, c.hidden), True),
        "output_norm.weight": ((c.hidden,), True),
        "output.weight": ((c.vocab_size, c.hidden), False),
        "rope_freqs.weight": ((c.rope.dim // 2,), False),
    } | {f"blk.{i}.{part}": entry for i in range(c.n_layers) for part, entry in layer.items()}


def find(config: ModelConfig, spelling: Spelling, stored: Mapping[str, TensorInfo], where: str) -> dict[str, Piece]:
    """Where each canonical tensor lies. Nothing may be missing, of another shape, or left over."""
    pieces = dict(_pieces(config, spelling, stored))
    allowed = shapes(config)
    for name, (shape, required) in allowed.items():
        if name in pieces:
            info = stored[pieces[name].source]
            rows = pieces[name].rows
            wanted = shape if rows is None else (rows.of, *shape[1:])
            if info.shape != wanted:
                raise BadModel(f"{where}: tensor {info.name} is {info.shape}, not {wanted}; fetch the model again")
        elif required:
            raise BadModel(f"{where} has no tensor {name}, which {config.architecture} needs; fetch the model again")
    used = {piece.source for name, piece in pieces.items() if name in allowed}
    for name in stored:
        if name not in used and not any(part in name for part in spelling.ignored):
            has = f"{where} has the tensor {name}, which a {config.architecture} model has no use for"
            raise BadModel(f"{has}; use a plain model, without adapters or experts")
    return {name: pieces[name] for name in allowed if name in pieces}


def _pieces(c: ModelConfig, spelling: Spelling, stored: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Piece]]:
    def plus(name: str) -> float:
        return spelling.norm_plus if name.endswith("norm") else 0.0

    for name, source in spelling.top.items():
        if source in stored:
            yield name, Piece(source, plus=plus(name.removesuffix(".weight")))
    pairs = {"attn_q": c.n_heads, "attn_k": c.n_kv_heads} if spelling.adjacent_pairs else {}
    wide, narrow = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    for i in range(c.n_layers):
        layer, canonical = spelling.layer.format(i), f"blk.{i}."
        for suffix in (".weight", ".bias"):
            for part, source in spelling.parts.items():
                if layer + source + suffix in stored:
                    piece = Piece(layer + source + suffix, None, pairs.get(part, 0), plus(part))
                    yield canonical + part + suffix, piece
            fused = layer + spelling.fused_attention + suffix
            if fused in stored and c.architecture == "phi3":
                whole = wide + 2 * narrow
                yield canonical + "attn_q" + suffix, Piece(fused, Rows(0, wide, whole))
                yield canonical + "attn_k" + suffix, Piece(fused, Rows(wide, wide + narrow, whole))
                yield canonical + "attn_v" + suffix, Piece(fused, Rows(wide + narrow, whole, whole))
            fused, ff = layer + spelling.fused_feed_forward + suffix, c.feed_forward
            alone = f"{layer}{spelling.parts['ffn_gate']}{suffix}" not in stored
            if fused in stored and c.architecture == "phi3" and alone:  # the gate comes first
                yield canonical + "ffn_gate" + suffix, Piece(fused, Rows(0, ff, 2 * ff))
                yield canonical + "ffn_up" + suffix, Piece(fused, Rows(ff, 2 * ff, 2 * ff))
