"""From a configuration to every size and byte offset, before anything is allocated.

`plan` is arithmetic: it resolves the strategy, groups layers of equal spec, turns a byte budget into blocks and lays
out the arena. What it says is what `KVCache` allocates. One arena holds all layers, in order:

    layer 0: K blocks | V blocks | K scales | V scales     (scales only where the codec has them)
    layer 1: ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kvarn.cache.codec import SCALE_BYTES, Codec
from kvarn.cache.codecs import CODECS
from kvarn.cache.layout import BlockShape, Layout, block_shape
from kvarn.cache.layouts import LAYOUTS
from kvarn.cache.placement import Geometry
from kvarn.cache.placements import PLACEMENTS
from kvarn.cache.spec import LayerSpec, align, groups
from kvarn.cache.strategy import Strategy, resolve
from kvarn.errors import KvarnError, OutOfMemory

DEFAULT_BLOCK = 32
SMALLEST_BLOCK = 16
MOST_TOKENS = 2**31 - 1
ALIGNMENT = 64  # a cache line; every region of the arena starts on one


@dataclass(frozen=True, slots=True)
class CacheConfig:
    layers: Sequence[LayerSpec]  # the model's, before the user's window
    context: int
    strategy: str = "auto"
    codec: str = "bf16"
    layout: str | None = None
    block_size: int | None = None
    max_seqs: int = 1
    max_chunk: int = 512
    window: int | None = None
    pinned: int | None = None
    cache_bytes: int | None = None
    watermarks: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise KvarnError("a cache needs at least one layer")
        for name in ("context", "max_seqs", "max_chunk", "block_size", "window", "pinned", "cache_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise KvarnError(f"{name} is {value!r}; it must be a whole number")
        for name in ("context", "max_seqs", "max_chunk"):
            if (value := getattr(self, name)) is None or value < 1:
                raise KvarnError(f"{name} is {value}; it must be at least 1")
        if self.context > MOST_TOKENS:
            raise KvarnError(f"context is {self.context}; positions are 32 bits, so {MOST_TOKENS} is the most")


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of equal spec: one table, one pool of blocks."""

    layers: tuple[int, ...]
    geometry: Geometry
    shape: BlockShape
    blocks_per_sequence: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the group holds when it is alone."""
        if self.blocks_per_sequence <= self.geometry.n_blocks:
            return self.geometry.context
        return self.geometry.n_blocks * self.geometry.block_size


@dataclass(frozen=True, slots=True)
class LayerOffsets:
    """Byte offsets into the arena. Without scales, the scale offsets stand at `end`."""

    k: int
    v: int
    k_scale: int
    v_scale: int
    end: int


@dataclass(frozen=True, slots=True)
class Plan:
    strategy: Strategy
    layout: Layout
    codec: Codec
    groups: tuple[Group, ...]
    offsets: tuple[LayerOffsets, ...]  # by layer
    max_seqs: int

    @property
    def nbytes(self) -> int:
        return self.offsets[-1].end

    @property
    def n_blocks(self) -> int:
        return sum(group.geometry.n_blocks for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Over all layers, scales and repeated heads included."""
        return sum(
            len(group.layers) * block_bytes(group.shape, self.codec) // group.shape.block_size for group in self.groups
        )


def block_bytes(shape: BlockShape, codec: Codec) -> int:
    """K and V of one block of one layer."""
    return 2 * (shape.cells * codec.dtype.itemsize + (shape.rows * SCALE_BYTES if codec.scaled else 0))


def plan(config: CacheConfig, default_layout: str = "token-major") -> Plan:
    strategy = resolve(config.strategy, config.context, config.max_seqs)
    codec = choose(CODECS, config.codec, "cache type")
    specs = _effective_specs(config, strategy)
    block_size = _block_size(config, strategy)
    layout = _layout(config, strategy, specs, block_size, default_layout)
    placement = PLACEMENTS[strategy.placement]

    drafts = []
    for spec, layers in groups(specs):
        chunk = min(config.max_chunk, config.context)
        geometry = Geometry(spec, block_size, 0, config.context, chunk, config.watermarks)
        shape = block_shape(layout, spec, block_size)
        drafts.append(Group(tuple(layers), geometry, shape, placement.blocks_per_sequence(geometry)))
    sized = tuple(_with_blocks(g, n) for g, n in zip(drafts, _counts(config, strategy, codec, drafts), strict=True))
    offsets = _offsets(sized, codec)
    if config.cache_bytes is not None and offsets[-1].end > config.cache_bytes:  # by what alignment adds
        return plan(replace(config, cache_bytes=config.cache_bytes - ALIGNMENT), default_layout)
    return Plan(strategy, layout, codec, sized, offsets, config.max_seqs)


Member = TypeVar("Member")


def choose(table: Mapping[str, Member], name: str, what: str) -> Member:
    if name not in table:
        raise KvarnError(f"unknown {what} {name!r}; there are: {', '.join(table)}")
    return table[name]


def _effective_specs(config: CacheConfig, strategy: Strategy) -> list[LayerSpec]:
    window = config.window
    if window is None and strategy.windowed:
        window = config.context
    pinned = min(strategy.pinned, config.context) if config.pinned is None else config.pinned
    if not 0 <= pinned <= config.context:
        raise KvarnError(f"{pinned} pinned tokens do not fit a context of {config.context}")
    return [spec.narrowed(window, pinned) for spec in config.layers]


def _block_size(config: CacheConfig, strategy: Strategy) -> int:
    size = config.block_size
    if size is None:
        # A whole panel more or less per slab costs nothing and lets every layout hold it.
        return align(config.context, DEFAULT_BLOCK) if strategy.one_page else DEFAULT_BLOCK
    if size < SMALLEST_BLOCK or size & (size - 1):
        raise KvarnError(f"block size {size}: it must be a power of two from {SMALLEST_BLOCK}")
    return size


def _layout(
    config: CacheConfig, strategy: Strategy, specs: Sequence[LayerSpec], block_size: int, default: str
) -> Layout:
    if config.layout and strategy.layout and config.layout != strategy.layout:
        raise KvarnError(
            f"strategy {strategy.name!r} is the {strategy.layout} layout; for {config.layout} use 'contiguous'"
        )
    name = config.layout or strategy.layout
    layout = choose(LAYOUTS, name or default, "cache layout")
    for spec in specs:
        if refusal := layout.refusal(spec, block_size):
            if name is None:  # nobody asked for it: the layout that always works
                return LAYOUTS["head-major"]
            raise KvarnError(f"the {layout.name} layout does not fit: {refusal}")
    return layout


def _counts(config: CacheConfig, strategy: Strategy, codec: Codec, drafts: Sequence[Group]) -> list[int]:
    """Blocks per group. Under a budget, groups with a bounded residency get theirs first, the others what is left."""
    wanted = [g.blocks_per_sequence * config.max_seqs for g in drafts]
    if config.cache_bytes is None:
        return wanted
    cost = [len(g.layers) * block_bytes(g.shape, codec) for g in drafts]
    elastic = strategy.placement == "paged"  # takes any number of blocks; a run is taken whole
    if not elastic:
        sequence = sum(g.blocks_per_sequence * c for g, c in zip(drafts, cost, strict=True))
        n = min(config.cache_bytes // sequence, config.max_seqs)
        _ensure_fits(n > 0, config, sequence, f"one sequence of {config.context} tokens")
        return [g.blocks_per_sequence * n for g in drafts]
    bounded = [g.blocks_per_sequence < g.geometry.context_blocks for g in drafts]
    windows = sum(n * c for n, c, fixed in zip(wanted, cost, bounded, strict=True) if fixed)
    row = sum(c for c, fixed in zip(cost, bounded, strict=True) if not fixed)
    rest = config.cache_bytes - windows
    _ensure_fits(rest >= row, config, windows + row, f"the windows of {config.max_seqs} sequences and one block more")
    return [n if fixed else rest // row for n, fixed in zip(wanted, bounded, strict=True)]


def _ensure_fits(fits: bool, config: CacheConfig, needed: int, what: str) -> None:
    if not fits:
        raise OutOfMemory(
            f"the cache budget is {config.cache_bytes:,} bytes and {what} need {needed:,}: "
            "raise the budget, or lower the context, the window or the number of sequences"
        )


def _with_blocks(group: Group, n_blocks: int) -> Group:
    g = group.geometry
    sized = Geometry(g.spec, g.block_size, n_blocks, g.context, g.max_chunk, g.watermarks)
    return Group(group.layers, sized, group.shape, group.blocks_per_sequence)


def _offsets(sized: Sequence[Group], codec: Codec) -> tuple[LayerOffsets, ...]:
    group_of = {layer: group for group in sized for layer in group.layers}
    offsets, at = [], 0
    for layer in sorted(group_of):
        group = group_of[layer]
        n = group.geometry.n_blocks
        cells = align(n * group.shape.cells * codec.dtype.itemsize, ALIGNMENT)
        scales = align(n * group.shape.rows * SCALE_BYTES, ALIGNMENT) if codec.scaled else 0
        v, k_scale = at + cells, at + 2 * cells
        offsets.append(LayerOffsets(at, v, k_scale, k_scale + scales, k_scale + 2 * scales))
        at = offsets[-1].end
    return tuple(offsets)
