"""Strategy sizes for real models, byte budgets, and what is refused at start-up."""

from dataclasses import fields, replace

import pytest

from kvarn.cache.codec import CODECS
from kvarn.cache.layouts import LAYOUTS
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.strategy import NAMES
from kvarn.errors import KvarnError, OutOfMemory

MIB = 1 << 20
TAILED = [name for name, codec in CODECS.items() if codec.tail]
GEMMA_LOCAL, GEMMA_GLOBAL = LayerSpec(4, 1, 256, 256, window=512), LayerSpec(4, 1, 256, 256)
MODELS = {  # name: layers, bytes per token at 16 bits: 2 * layers * kv_heads * dim * 2
    "Phi-4": ([LayerSpec(40, 10, 128, 128)] * 40, 204_800),
    "TinyLlama": ([LayerSpec(32, 4, 64, 64)] * 22, 22_528),
    "Qwen2.5-1.5B": ([LayerSpec(12, 2, 128, 128)] * 28, 28_672),
    "Llama 3.1 8B": ([LayerSpec(32, 8, 128, 128)] * 32, 131_072),
    "Gemma 3 270M": (([GEMMA_LOCAL] * 5 + [GEMMA_GLOBAL]) * 3, 18_432),
}


@pytest.mark.parametrize(("layers", "per_token"), MODELS.values(), ids=MODELS)
def test_sizes_of_every_strategy(layers: list[LayerSpec], per_token: int) -> None:
    for context in (1024, 2048, 4096, 8192):
        sizes = {}
        for name in NAMES:
            sizes[name] = plan(CacheConfig(layers, context, name, "bf16", window=1024, max_chunk=512)).nbytes
        group = layers[0].group
        assert sizes["contiguous"] == sizes["head-major"] == context * per_token
        assert sizes["repeated"] == group * sizes["contiguous"]
        assert sizes["auto"] == sizes["paged" if context >= 2048 else "contiguous"]
        ring = -(-(1024 + 512 - 2) // 32) + 1  # 49 blocks for a window of 1,024 written in chunks of 512
        local = -(-(512 + 512 - 2) // 32) + 1
        blocks = {None: min(ring, context // 32), 512: min(local, context // 32)}
        by_hand = sum(blocks[spec.window] * 32 * spec.n_kv_heads * spec.k_dim * 4 for spec in layers)
        assert sizes["ring"] == sizes["sliding"] == by_hand
        pinned = [min(blocks[spec.window] + 1, context // 32) for spec in layers]  # a block for the first tokens
        held = sum(n * 32 * spec.n_kv_heads * spec.k_dim * 4 for n, spec in zip(pinned, layers, strict=True))
        assert sizes["sinks"] == held


def test_a_window_does_not_shrink_what_keeps_everything() -> None:
    layers, per_token = MODELS["TinyLlama"]
    assert plan(CacheConfig(layers, 4096, "contiguous", "bf16", window=64)).nbytes == 4096 * per_token


@pytest.mark.parametrize(("layers", "per_token"), MODELS.values(), ids=MODELS)
def test_codecs_by_bytes(layers: list[LayerSpec], per_token: int) -> None:
    sizes = {codec: plan(CacheConfig(layers, 1024, "contiguous", codec)).bytes_per_token for codec in CODECS}
    assert sizes["f16"] == sizes["bf16"] == per_token
    assert sizes["f32"] == 2 * per_token
    scales = sum(2 * spec.n_kv_heads * 4 for spec in layers)
    assert sizes["int8"] == per_token // 2 + scales
    blocks = sum(2 * spec.n_kv_heads * spec.k_dim // 32 for spec in layers)
    assert sizes["int6"] == (4 * 6 + 1) * blocks
    assert sizes["int4"] == (4 * 4 + 1) * blocks


def test_a_tail_is_two_tiles_of_int8_for_each_sequence() -> None:
    layers, per_token = [LayerSpec(9, 3, 64, 64)] * 30, 23_040
    for codec, parts in (("int4", 2), ("bf16/int4", 1), ("int6/bf16", 1), ("int8", 0)):
        config = CacheConfig(layers, 512, "contiguous", codec, max_seqs=5)
        made, rows = plan(config), parts * 30 * 3 * (64 + 4)
        assert made.nbytes == 5 * 512 * made.bytes_per_token + 5 * 2 * 32 * rows
        assert sum(group.tail_bytes for group in made.groups) == 2 * 32 * rows
        budget = plan(replace(config, cache_bytes=made.nbytes))
        assert budget.nbytes == made.nbytes
        assert plan(replace(config, cache_bytes=made.nbytes - 1)).groups[0].config.n_blocks == 4
    assert plan(CacheConfig(layers, 512, "contiguous", "bf16", max_seqs=5)).nbytes == 5 * 512 * per_token


def test_gemma_paged_keeps_whole_contexts_only_where_they_are_seen() -> None:
    layers, _ = MODELS["Gemma 3 270M"]
    local, full = plan(CacheConfig(layers, 32_768, "paged", "bf16", max_chunk=512)).groups
    assert (len(local.layers), len(full.layers)) == (15, 3)
    assert local.config.n_blocks == 33
    assert full.config.n_blocks == 1024


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", CODECS)
def test_regions_are_aligned_and_do_not_overlap(layout: str, codec: str) -> None:
    layers = [LayerSpec(6, 2, 5, 5), LayerSpec(6, 2, 5, 5, window=30), LayerSpec(6, 2, 5, 5)]
    made = plan(CacheConfig(layers, 160, "paged", codec, layout=layout, max_seqs=3, max_chunk=16))
    at = 0
    for offsets in made.offsets:
        assert offsets.k == at
        assert offsets.k < offsets.v < offsets.end
        starts = [getattr(offsets, field.name) for field in fields(offsets)]
        assert starts == sorted(starts)
        assert all(offset % 64 == 0 for offset in starts)
        assert (offsets.k_tail < offsets.v_tail < offsets.k_tail_scale < offsets.v_tail_scale) == (codec in TAILED)
        at = offsets.end
    assert made.nbytes == at


@pytest.mark.parametrize("strategy", NAMES)
def test_a_budget_is_kept_and_used(strategy: str) -> None:
    layers, per_token = [LayerSpec(9, 3, 64, 64)] * 30, 23_040
    budget = 100 * MIB
    made = plan(CacheConfig(layers, 512, strategy, "bf16", max_seqs=64, cache_bytes=budget))
    assert made.nbytes <= budget
    largest = made.groups[0].blocks_per_sequence * made.groups[0].config.block_size * per_token
    assert budget - made.nbytes < largest * (3 if strategy == "repeated" else 1), "less than one sequence is left over"


def test_a_budget_serves_windows_first() -> None:
    layers = [GEMMA_LOCAL, GEMMA_GLOBAL]
    block = 32 * 256 * 2 * 2
    made = plan(CacheConfig(layers, 8192, "paged", "bf16", max_seqs=4, max_chunk=512, cache_bytes=200 * block))
    assert [g.config.n_blocks for g in made.groups] == [4 * 33, 200 - 4 * 33]


@pytest.mark.parametrize("strategy", ["contiguous", "ring", "paged"])
def test_a_budget_that_holds_nothing_is_refused_with_the_numbers(strategy: str) -> None:
    layers, _ = MODELS["TinyLlama"]
    with pytest.raises(OutOfMemory, match=r"the cache budget is 1,000 bytes and .* need [\d,]+: raise the budget"):
        plan(CacheConfig(layers, 2048, strategy, "bf16", cache_bytes=1000))


SPEC = LayerSpec(4, 2, 8, 8)
REFUSED = {
    "unknown strategy": (dict(strategy="magic"), "unknown cache strategy 'magic'; there are: contiguous"),
    "unknown codec": (dict(codec="q4"), f"unknown cache type 'q4'; there are: {', '.join(CODECS)}"),
    "unknown layout": (dict(layout="diagonal"), "unknown cache layout 'diagonal'; there are: token-major"),
    "block of 8": (dict(block_size=8), "block size 8: it must be a power of two from 16"),
    "block of 16 with a tail": (
        dict(codec="f32/int4", block_size=16),
        "block size 16: f32/int4 cells are made 32 tokens at a time; use 32 or more",
    ),
    "block of 48": (dict(block_size=48), "block size 48: it must be a power of two from 16"),
    "panel of 16": (dict(layout="panel", block_size=16, strategy="paged"), "use block size 32 or more, or head-major"),
    "two layouts": (dict(strategy="repeated", layout="panel"), "is the repeated layout; for panel use 'contiguous'"),
    "repeated without GQA": (dict(strategy="repeated", layers=[LayerSpec(2, 2, 8, 8)]), "use head-major"),
    "no layers": (dict(layers=[]), "at least one layer"),
    "no context": (dict(context=0), "context is 0; it must be at least 1"),
    "no sequences": (dict(max_seqs=0), "max_seqs is 0; it must be at least 1"),
    "no chunk": (dict(max_chunk=0), "max_chunk is 0; it must be at least 1"),
    "window of 0": (dict(window=0, strategy="ring"), "the window is 0; it must be at least 1"),
    "negative pins": (dict(pinned=-1), "-1 pinned tokens do not fit a context of 256"),
    "more pins than context": (dict(pinned=300), "300 pinned tokens do not fit a context of 256"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_settings_are_refused_in_one_line(change: dict, message: str) -> None:
    with pytest.raises(KvarnError) as raised:
        plan(CacheConfig(**(dict(layers=[SPEC], context=256, strategy="contiguous") | change)))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("bad", [(0, 1, 8, 8), (4, 3, 8, 8), (4, 0, 8, 8), (4, 2, 0, 8), (4, 2, 8, 0)])
def test_invalid_head_counts_are_refused(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(KvarnError):
        LayerSpec(*bad)


def test_head_major_replaces_a_default_layout_that_does_not_fit() -> None:
    assert plan(CacheConfig([SPEC], 256, "paged"), default_layout="panel").layout.name == "panel"
    assert plan(CacheConfig([SPEC], 256, "paged", block_size=16), default_layout="panel").layout.name == "head-major"


def test_a_budget_larger_than_needed_is_kept_for_reuse() -> None:
    one = plan(CacheConfig([SPEC], 1024, "paged", "bf16"))
    big = plan(CacheConfig([SPEC], 1024, "paged", "bf16", cache_bytes=3 * one.nbytes))
    assert big.n_blocks == 3 * one.n_blocks
