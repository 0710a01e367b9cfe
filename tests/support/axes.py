"""The axes of the cache that tests multiply: specs, block sizes, and a configuration of a point in the product."""

from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.strategy import STRATEGIES
from kvarn.errors import KvarnError

CONTEXT, CHUNK = 160, 48
SPECS = {
    "gqa": LayerSpec(6, 2, 8, 8),
    "mha": LayerSpec(2, 2, 16, 16),
    "mqa": LayerSpec(4, 1, 8, 8),
    "window": LayerSpec(6, 2, 8, 8, window=40),
    "window of 1": LayerSpec(6, 2, 8, 8, window=1),
    "pinned": LayerSpec(6, 2, 8, 8, window=24, pinned=5),
    "pinned past a block": LayerSpec(6, 2, 8, 8, window=24, pinned=37),
}
BLOCKS = (None, 16, 32, 64)  # None: the strategy's own
PAGES = BLOCKS[1:]
PAIRS = (
    "int8/bf16",
    "f32/int8",
    "bf16/f16",
    "int8/int4",
    "int6/f16",
    "int6/int4",
    "f32/int6",
)  # codecs of K and V; a kernel knows one of the two


def block_sizes(strategy: str) -> tuple[int | None, ...]:
    """A strategy's own size is that of a slab, or one of the others."""
    return BLOCKS if STRATEGIES[strategy].one_page else PAGES


def config_of(
    spec: LayerSpec, strategy: str, layout: str | None, block_size: int | None, codec: str = "f32"
) -> CacheConfig:
    window = dict(window=spec.window, pinned=spec.pinned)
    return CacheConfig([spec], CONTEXT, strategy, codec, layout, block_size, max_chunk=CHUNK, max_seqs=4, **window)


def allowed(config: CacheConfig) -> bool:
    """What must be refused is listed in test_layouts."""
    try:
        plan(config)
    except KvarnError:
        return False
    return True
