"""Models as graphs: widths are known, what does not fit is refused by name, and what fusion makes is spelled out."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support import tiny
from support.harness import Driven, score

from kvarn.backends.reference import Reference
from kvarn.backends.reference.program import ReferenceProgram
from kvarn.cache.plan import CacheConfig
from kvarn.errors import KvarnError
from kvarn.graph.fuse import fuse
from kvarn.graph.kinds import (
    Add,
    Attention,
    Embed,
    Gate,
    Kind,
    Logits,
    Norm,
    NormAdd,
    Product,
    Segment,
    Select,
    makes,
    reads,
)
from kvarn.graph.ops import Centre, Rope
from kvarn.graph.record import Graph, Heads, Value, record
from kvarn.models.families import FAMILIES, graph_of

# -- recording ---------------------------------------------------------------------------------------------------------


class Noting:
    """The reference's operations, with a list of what was called and how wide its result is."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            result = getattr(self.ops, name)(*args)
            if name != "has":
                self.calls.append((name, result.shape[-1]))
            return result

        return call


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_value_is_as_wide_as_the_array_that_the_reference_computes(architecture: str) -> None:
    notes: list[Noting] = []

    def forward(ops: Any, config: Any) -> Any:
        notes.append(Noting(ops))
        return FAMILIES[architecture].forward(notes[-1], config)

    config = tiny.config_of(architecture)
    program = ReferenceProgram(config, tiny.weights_of(config), forward=forward)
    cache = Driven(CacheConfig(program.config.layer_specs, 16, "paged", "f32"), Reference())
    score(program, cache, [1, 2, 3], 0, 3)
    graph = graph_of(program.config, tiny.shapes_of(program.config))
    assert [(node.op, node.out.width) for node in graph.nodes] == notes[0].calls
    assert [node.out.id for node in graph.nodes] == list(range(len(graph.nodes)))


def test_weights_are_named_once_in_order_of_first_use() -> None:
    config = replace(tiny.config_of("qwen2"), n_layers=1)
    block = "blk.0."
    assert graph_of(config, tiny.shapes_of(config)).weights == (
        "token_embd.weight",  # and again for the logits
        block + "attn_norm.weight",
        *(f"{block}attn_{name}.{kind}" for name in "qkv" for kind in ("weight", "bias")),
        block + "attn_output.weight",
        block + "ffn_norm.weight",
        block + "ffn_gate.weight",
        block + "ffn_up.weight",
        block + "ffn_down.weight",
        "output_norm.weight",
    )


HIDDEN, WIDE, NARROW, FF = tiny.HIDDEN, tiny.HEADS * tiny.DIM, tiny.KV * tiny.DIM, tiny.FF
REFUSED_SHAPES: dict[str, tuple[str, dict[str, tuple[int, ...]], str]] = {
    "norm": ("llama", {"blk.1.ffn_norm.weight": (47,)}, r"tensor blk.1.ffn_norm.weight is \(47,\); .* needs \(48,\)"),
    "norm per head": ("qwen3", {"blk.0.attn_k_norm.weight": (15,)}, r"attn_k_norm.weight is \(15,\); .* needs \(16,\)"),
    "columns": ("llama", {"blk.0.attn_v.weight": (NARROW, 47)}, r"attn_v.weight is \(32, 47\); .* needs \(32, 48\)"),
    "bias": ("qwen2", {"blk.2.attn_q.bias": (63,)}, r"blk.2.attn_q.bias is \(63,\); the model needs \(64,\)"),
    "a matrix that is none": (
        "llama",
        {"blk.0.ffn_up.weight": (FF,)},
        r"ffn_up.weight is \(80,\), and a matrix has two",
    ),
    "sum": (
        "llama",
        {"blk.0.attn_output.weight": (47, WIDE)},
        "add: embed token_embd.weight is 48 wide and linear blk.0.attn_output.weight is 47",
    ),
    "gate": (
        "gemma3",
        {"blk.0.ffn_up.weight": (81, HIDDEN)},
        "gated: linear blk.0.ffn_gate.weight is 80 wide and linear blk.0.ffn_up.weight is 81",
    ),
    "q": (
        "llama",
        {"blk.0.attn_q.weight": (80, HIDDEN)},
        r"attention of layer 0: q \(rope of linear blk.0.attn_q.weight\) is 80 wide, and 4 heads of 16 are 64",
    ),
    "k": ("llama", {"blk.1.attn_k.weight": (40, HIDDEN)}, "attention of layer 1: k .* is 40 wide, and 2 heads of 16"),
    "v": (
        "llama",
        {"blk.0.attn_v.weight": (31, HIDDEN)},
        r"attention of layer 0: v \(linear blk.0.attn_v.weight\) is 31 wide, and 2 heads of 16 are 32",
    ),
    "heads of unequal size": (
        "llama",
        {"blk.0.attn_q.weight": (63, HIDDEN)},
        "63 wide, which is not a multiple of 4 heads",
    ),
    "rope wider than a head": ("llama", {"blk.0.attn_k.weight": (16, HIDDEN)}, "16 dimensions of a head of 8"),
    "logits": ("llama", {"output.weight": (tiny.VOCAB, 47)}, r"output.weight is \(101, 47\); .* needs \(101, 48\)"),
    "a token without an embedding": ("llama", {"output.weight": (102, HIDDEN)}, r"token_embd.weight is \(101, 48\)"),
}


@pytest.mark.parametrize(("architecture", "changed", "message"), REFUSED_SHAPES.values(), ids=REFUSED_SHAPES)
def test_a_weight_that_does_not_fit_is_refused_by_name(
    architecture: str, changed: dict[str, tuple[int, ...]], message: str
) -> None:
    config = tiny.config_of(architecture)
    with pytest.raises(KvarnError, match=message):
        graph_of(config, tiny.shapes_of(config) | changed)


def test_a_weight_that_is_missing_is_refused_by_name() -> None:
    config = tiny.config_of()
    shapes = tiny.shapes_of(config)
    del shapes["blk.2.ffn_down.weight"]
    with pytest.raises(KvarnError, match=r"the model has no tensor blk\.2\.ffn_down\.weight"):
        graph_of(config, shapes)


def test_recording_and_fusion_need_no_array_and_no_kernel() -> None:
    code = "import sys, kvarn.graph.fuse; print({'numpy', 'kvarn._native', 'kvarn.models'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# -- fusion ------------------------------------------------------------------------------------------------------------


def test_a_llama_of_one_layer() -> None:
    config = replace(tiny.config_of("llama"), n_layers=1)
    x, h, q, k, v, attended = Value(0, 48), Value(1, 48), Value(2, 64), Value(4, 32), Value(6, 32), Value(7, 64)
    x2, h2, gate, up, gated = Value(9, 48), Value(10, 48), Value(11, 80), Value(12, 80), Value(13, 80)
    x3, last = Value(15, 48), Value(16, 48)
    assert fuse(graph_of(config, tiny.shapes_of(config))) == [
        Embed(x, "token_embd.weight", 1.0),
        Norm(h, x, "blk.0.attn_norm.weight"),
        Product(
            h,
            (
                Segment(q, "blk.0.attn_q.weight"),
                Segment(k, "blk.0.attn_k.weight"),
                Segment(v, "blk.0.attn_v.weight"),
            ),
        ),
        Attention(attended, q, k, v, None, None, config.rope, None, 0, 0.25, Heads(4, 2, 16)),
        Select((x, attended)),
        Product(attended, (Segment(x2, "blk.0.attn_output.weight", None, x),)),
        Norm(h2, x2, "blk.0.ffn_norm.weight"),
        Product(h2, (Segment(gate, "blk.0.ffn_gate.weight"), Segment(up, "blk.0.ffn_up.weight"))),
        Gate(gated, gate, up, "silu"),
        Product(gated, (Segment(x3, "blk.0.ffn_down.weight", None, x2),)),
        Norm(last, x3, "output_norm.weight"),
        Logits(last, "token_embd.weight"),
    ]


def one(kinds: list[Kind], kind: type) -> Any:
    """The first of this kind."""
    return next(each for each in kinds if isinstance(each, kind))


def test_biases_ride_with_their_matrices() -> None:
    config = tiny.config_of("qwen2")
    segments = one(fuse(graph_of(config, tiny.shapes_of(config))), Product).segments
    assert [s.bias for s in segments] == [f"blk.0.attn_{letter}.bias" for letter in "qkv"]


def test_keys_with_a_bias_are_centred_inside_attention() -> None:
    config = tiny.config_of("qwen2")
    kinds = fuse(graph_of(config, tiny.shapes_of(config)))
    attentions = [kind for kind in kinds if isinstance(kind, Attention)]
    assert [kind.centre for kind in attentions] == [
        Centre(f"blk.{layer}.attn_k.bias", config.rope, config.context) for layer in range(config.n_layers)
    ]


def test_gemma_norms_heads_inside_attention_and_adds_what_it_normed() -> None:
    config = tiny.config_of("gemma3")
    kinds = fuse(graph_of(config, tiny.shapes_of(config)))
    layer = [Norm, Product, Attention, Product, NormAdd, Norm, Product, Gate, Product, NormAdd]
    last = [*layer[:3], Select, *layer[3:]]
    assert [type(kind) for kind in kinds] == [Embed, *layer, *layer, *last, Norm, Logits]
    attention = one(kinds, Attention)
    assert (attention.q_norm, attention.k_norm) == ("blk.0.attn_q_norm.weight", "blk.0.attn_k_norm.weight")
    assert attention.rope == config.local_rope
    added = one(kinds, NormAdd)
    assert (added.weight, added.into) == ("blk.0.post_attention_norm.weight", Value(0, HIDDEN))


# A toy with one layer; each test below puts something else between its pieces.
ROPE = Rope(100.0, 4)
CENTRE = Centre("head_norm", ROPE, 8)
SHAPES = {"embed": (7, 8), "norm": (8,), "head_norm": (4,), "q": (8, 8), "kv": (4, 8), "out": (8, 8)}
Forward = Callable[[Any, Any], Any]


def toy(forward: Forward) -> Graph:
    return record(forward, Heads(2, 1, 4), SHAPES)


def attend(ops: Any, h: Any, q: Any = None, k: Any = None) -> Any:
    q = ops.rope(ops.linear(h, "q"), 2, ROPE) if q is None else q
    k = ops.rope(ops.linear(h, "kv"), 1, ROPE) if k is None else k
    return ops.attention(3, q, k, ops.linear(h, "kv"), 1.0)


def end(ops: Any, x: Any) -> Any:
    return ops.logits(ops.rms_norm(x, "norm"), "embed")


def plain(ops: Any, config: Any) -> Any:
    x = ops.embed("embed")
    return end(ops, ops.add(x, ops.linear(attend(ops, ops.rms_norm(x, "norm")), "out")))


def test_the_toy_graph_is_valid() -> None:
    assert len(fuse(toy(plain))) == 8


def test_a_sum_that_no_matrix_can_do_stays_a_sum() -> None:
    """Both sides are outputs of one product: neither is there before the other."""

    def forward(ops: Any, config: Any) -> Any:
        h = attend(ops, ops.rms_norm(ops.embed("embed"), "norm"))
        return end(ops, ops.add(ops.linear(h, "q"), ops.linear(h, "out")))

    assert [type(kind) for kind in fuse(toy(forward))][-5:] == [Select, Product, Add, Norm, Logits]


def test_a_sum_of_two_matrices_is_done_by_the_later_one() -> None:
    def forward(ops: Any, config: Any) -> Any:
        x = ops.linear(ops.rms_norm(ops.embed("embed"), "norm"), "q")
        h = ops.rms_norm(ops.embed("embed"), "norm")
        return end(ops, ops.add(x, ops.linear(attend(ops, h), "out")))

    kinds = fuse(toy(forward))
    assert Add not in [type(kind) for kind in kinds]
    assert [kind.segments[0].into for kind in kinds if isinstance(kind, Product)] == [None, None, Value(2, 8)]


def norm_read_by_a_sum(ops: Any, config: Any) -> Any:
    h = ops.rms_norm(ops.embed("embed"), "norm")
    return end(ops, ops.add(h, ops.linear(attend(ops, h), "out")))


def gate_read_by_a_norm(ops: Any, config: Any) -> Any:
    h = attend(ops, ops.rms_norm(ops.embed("embed"), "norm"))
    return end(ops, ops.gated(ops.linear(h, "q"), ops.linear(h, "out"), "silu"))


def matrix_of_an_embedding(ops: Any, config: Any) -> Any:
    return end(ops, ops.linear(attend(ops, ops.embed("embed")), "out"))


def rope_before_norm(ops: Any, config: Any) -> Any:
    h = ops.rms_norm(ops.embed("embed"), "norm")
    q = ops.rms_norm(ops.rope(ops.linear(h, "q"), 2, ROPE), "head_norm", 2)
    return end(ops, ops.linear(attend(ops, h, q), "out"))


def two_ropes(ops: Any, config: Any) -> Any:
    h = ops.rms_norm(ops.embed("embed"), "norm")
    q = ops.rope(ops.rope(ops.linear(h, "q"), 2, ROPE), 2, ROPE)
    return end(ops, ops.linear(attend(ops, h, q), "out"))


def two_norms(ops: Any, config: Any) -> Any:
    h = ops.rms_norm(ops.embed("embed"), "norm")
    q = ops.rms_norm(ops.rms_norm(ops.linear(h, "q"), "head_norm", 2), "head_norm", 2)
    return end(ops, ops.linear(attend(ops, h, ops.rope(q, 2, ROPE)), "out"))


def ropes_that_differ(ops: Any, config: Any) -> Any:
    h = ops.rms_norm(ops.embed("embed"), "norm")
    k = ops.rope(ops.linear(h, "kv"), 1, Rope(200.0, 4))
    return end(ops, ops.linear(attend(ops, h, k=k), "out"))


def rope_of_q_only(ops: Any, config: Any) -> Any:
    h = ops.rms_norm(ops.embed("embed"), "norm")
    return end(ops, ops.linear(attend(ops, h, k=ops.linear(h, "kv")), "out"))


def norm_of_all_heads_together(ops: Any, config: Any) -> Any:
    h = ops.rms_norm(ops.embed("embed"), "norm")
    q = ops.rope(ops.rms_norm(ops.linear(h, "q"), "norm"), 2, ROPE)
    return end(ops, ops.linear(attend(ops, h, q), "out"))


def q_read_twice(ops: Any, config: Any) -> Any:
    h = ops.rms_norm(ops.embed("embed"), "norm")
    q = ops.linear(h, "q")
    return end(ops, ops.add(q, ops.linear(attend(ops, h, ops.rope(q, 2, ROPE)), "out")))


def norm_per_head_of_a_sum(ops: Any, config: Any) -> Any:
    x = ops.embed("embed")
    h = ops.linear(attend(ops, ops.rms_norm(x, "norm")), "out")
    return end(ops, ops.add(x, ops.rms_norm(h, "head_norm", 2)))


def centre_of_q(ops: Any, config: Any) -> Any:
    h = ops.rms_norm(ops.embed("embed"), "norm")
    q = ops.centred(ops.rope(ops.linear(h, "q"), 2, ROPE), 2, Centre("norm", ROPE, 8))
    return end(ops, ops.linear(attend(ops, h, q), "out"))


def centre_before_rope(ops: Any, config: Any) -> Any:
    h = ops.rms_norm(ops.embed("embed"), "norm")
    k = ops.rope(ops.centred(ops.linear(h, "kv"), 1, CENTRE), 1, ROPE)
    return end(ops, ops.linear(attend(ops, h, None, k), "out"))


def centre_of_v(ops: Any, config: Any) -> Any:
    h = ops.rms_norm(ops.embed("embed"), "norm")
    q, k = ops.rope(ops.linear(h, "q"), 2, ROPE), ops.rope(ops.linear(h, "kv"), 1, ROPE)
    v = ops.centred(ops.linear(h, "kv"), 1, CENTRE)
    return end(ops, ops.linear(ops.attention(3, q, k, v, 1.0), "out"))


def rope_of_v(ops: Any, config: Any) -> Any:
    h = ops.rms_norm(ops.embed("embed"), "norm")
    v = ops.rope(ops.linear(h, "kv"), 1, ROPE)
    q, k = ops.rope(ops.linear(h, "q"), 2, ROPE), ops.rope(ops.linear(h, "kv"), 1, ROPE)
    return end(ops, ops.linear(ops.attention(3, q, k, v, 1.0), "out"))


def sum_into_what_is_needed(ops: Any, config: Any) -> Any:
    x = ops.embed("embed")
    y = ops.add(x, ops.linear(attend(ops, ops.rms_norm(x, "norm")), "out"))
    return end(ops, ops.add(x, y))


def sum_of_a_value_with_itself(ops: Any, config: Any) -> Any:
    x = ops.linear(attend(ops, ops.rms_norm(ops.embed("embed"), "norm")), "out")
    return end(ops, ops.add(x, x))


def something_after_the_logits(ops: Any, config: Any) -> Any:
    return ops.rms_norm(ops.embed("embed"), "norm") if plain(ops, config) else None


def no_attention(ops: Any, config: Any) -> Any:
    return end(ops, ops.embed("embed"))


REFUSED_GRAPHS: dict[Forward, str] = {
    norm_read_by_a_sum: r"rms_norm norm is read by add \(node 9\): only a matrix may read it",
    gate_read_by_a_norm: r"gated \(node 10\) is read by rms_norm norm: only a matrix",
    matrix_of_an_embedding: "linear q reads embed embed: a matrix may read a norm, a gate or attention",
    rope_before_norm: "attention of layer 3, q: rope before the norm",
    two_ropes: "attention of layer 3, q: a second rope",
    two_norms: "attention of layer 3, q: a second norm, head_norm",
    ropes_that_differ: r"attention of layer 3: the ropes of q and k differ \(.*100.0.*200.0",
    rope_of_q_only: r"attention of layer 3: the ropes of q and k differ \(.* and None\)",
    norm_of_all_heads_together: "attention of layer 3, q: rms_norm norm has another number of heads than attention",
    q_read_twice: "attention of layer 3, q: linear q is read by others as well",
    norm_per_head_of_a_sum: "rms_norm head_norm: a norm per head is possible for q and k of attention only",
    centre_of_q: "attention of layer 3, q: only keys are centred",
    centre_before_rope: "attention of layer 3, k: centred a second time, or before rope or the norm",
    centre_of_v: "linear kv: centring is possible for k of attention only",
    rope_of_v: "linear kv: rope is possible for q and k of attention only",
    sum_into_what_is_needed: "embed embed is still needed when Product overwrites it",
    sum_of_a_value_with_itself: "linear out is still needed when Add overwrites it",
    something_after_the_logits: "last operation is not logits",
    no_attention: "the model has no attention",
}


@pytest.mark.parametrize(("forward", "message"), REFUSED_GRAPHS.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_graph_that_does_not_fit_is_refused_by_name(forward: Forward, message: str) -> None:
    with pytest.raises(KvarnError, match=message):
        fuse(toy(forward))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_value_is_made_before_it_is_read(architecture: str) -> None:
    config = tiny.config_of(architecture)
    made: set[Value] = set()
    for kind in fuse(graph_of(config, tiny.shapes_of(config))):
        assert made.issuperset(kind.values if isinstance(kind, Select) else reads(kind)), kind
        made.update(makes(kind))
