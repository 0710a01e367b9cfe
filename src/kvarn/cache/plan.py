"""The plan of a cache: every size and byte offset, computed before anything is allocated.

`plan` resolves the strategy, groups layers of equal spec, turns a byte budget into a number of blocks
and lays out the arena. A backend allocates exactly what the plan says. One arena holds all layers:

    layer 0: K blocks | V blocks | K scales | V scales | tails: K | V | K scales | V scales
    layer 1: ...

Scales and tails are there only where the codec has them. A tail is a little store of int8 cells, in blocks
of one tile: tile t of the sequence in table row r is in block 2 r + t % 2 of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kvarn.cache.codec import TILE, CodecPair, codecs_of, unit_bytes
from kvarn.cache.group_config import GroupConfig
from kvarn.cache.layout import BlockShape, Layout, Strides
from kvarn.cache.layouts import LAYOUTS
from kvarn.cache.placements import PLACEMENTS
from kvarn.cache.spec import LayerSpec, align, groups
from kvarn.cache.step import Step
from kvarn.cache.strategy import Strategy, resolve
from kvarn.errors import KvarnError, OutOfMemory
from kvarn.words import counted

DEFAULT_BLOCK = 32
SMALLEST_BLOCK = 16
MOST_TOKENS = 2**31 - 1
MOST_SEQUENCES = 1 << 16
ALIGNMENT = 64  # every part of the arena starts on a cache line
TAIL_TILES = 2  # of a sequence: the one that is being filled, and the one before it


@dataclass(frozen=True, slots=True)
class CacheConfig:
    layers: Sequence[LayerSpec]  # the model's specs, without the user's window
    context: int
    strategy: str = "auto"
    codec: str = "bf16"  # of K and V, or K/V
    layout: str | None = None
    block_size: int | None = None
    max_seqs: int = 1
    max_chunk: int = 512
    window: int | None = None
    pinned: int | None = None
    cache_bytes: int | None = None
    watermarks: tuple[float, float] | None = None
    ahead: int = 0  # tokens of a sequence that may be computed before they are committed (for asynchronous steps)

    def __post_init__(self) -> None:
        if not self.layers:
            raise KvarnError("a cache needs at least one layer")
        for name in ("context", "max_seqs", "max_chunk", "block_size", "window", "pinned", "cache_bytes", "ahead"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise KvarnError(f"{name} is {value!r}; it must be a whole number")
        for name in ("context", "max_seqs", "max_chunk"):
            if (value := getattr(self, name)) is None or value < 1:
                raise KvarnError(f"{name} is {value}; it must be at least 1")
        if self.ahead < 0:
            raise KvarnError(f"ahead is {self.ahead}; it must be 0 or more")
        for name, value in (("context", self.context), ("window", self.window or 0)):
            if value > MOST_TOKENS:
                raise KvarnError(f"{name} is {value}; positions are 32 bits, so {MOST_TOKENS} is the most")
        if self.max_seqs > MOST_SEQUENCES:
            raise KvarnError(f"max_seqs is {self.max_seqs}; {MOST_SEQUENCES} is the most")
        for name in ("strategy", "codec", "layout"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name != "layout"):
                raise KvarnError(f"{name} is {value!r}; it must be a name")


@dataclass(frozen=True, slots=True)
class Part:
    """A block of one layer's K, V, K scales or V scales."""

    unit: str
    shape: BlockShape
    strides: Strides

    @property
    def block_bytes(self) -> int:
        return self.shape.total * unit_bytes(self.unit)


@dataclass(frozen=True, slots=True)
class Parts:
    k: Part
    v: Part
    k_scale: Part  # 0 units if the codec of K has no scales
    v_scale: Part

    @property
    def each(self) -> tuple[Part, Part, Part, Part]:
        """In their order in the arena."""
        return self.k, self.v, self.k_scale, self.v_scale

    @property
    def token_bytes(self) -> tuple[int, int]:
        """K and V of one token in one layer, with scales."""
        size = self.k.shape.block_size
        k, v = self.k.block_bytes + self.k_scale.block_bytes, self.v.block_bytes + self.v_scale.block_bytes
        return k // size, v // size

    @property
    def block_bytes(self) -> int:
        """All parts of one block of one layer."""
        return sum(part.block_bytes for part in self.each)


def parts_of(layout: Layout, codec: CodecPair, spec: LayerSpec, block_size: int) -> Parts:
    heads, panel = layout.stored_heads(spec), layout.panel_size(block_size)

    def part(unit: str, units: int, strides: Callable[[BlockShape], Strides]) -> Part:
        shape = BlockShape(heads, units, block_size, panel)
        return Part(unit, shape, strides(shape))

    k, v = codec.k.row(spec.k_dim), codec.v.row(spec.v_dim)
    return Parts(
        part(k.unit, k.units, layout.k_strides),
        part(v.unit, v.units, layout.v_strides),
        part(k.scale_unit, k.scales, layout.k_strides),
        part(v.scale_unit, v.scales, layout.v_strides),
    )


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of equal spec. They share one table and one pool of blocks."""

    layers: tuple[int, ...]
    config: GroupConfig
    parts: Parts
    blocks_per_sequence: int
    tail: Parts | None = None

    @property
    def bytes_per_token(self) -> int:
        """All layers of the group, with scales and repeated heads, without the tail."""
        return len(self.layers) * self.parts.block_bytes // self.config.block_size

    def read_bytes(self, first: int, length: int) -> int:
        """Bytes that the queries from position `first` up to `length` of one sequence read in one layer."""
        ends = length, (length - 1) // TILE * TILE, first // TILE * TILE
        keys, cells, before = (self.config.spec.seen(first, end) for end in ends)
        tails = self.tail.token_bytes if self.tail else (0, 0)
        return sum(
            cells * row + (keys - before) * tail if tail else keys * row
            for row, tail in zip(self.parts.token_bytes, tails, strict=True)
        )

    @property
    def tail_bytes(self) -> int:
        """The tail of one sequence, in all layers of the group."""
        return len(self.layers) * TAIL_TILES * self.tail.block_bytes if self.tail else 0

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that fits when it is alone in the group."""
        if self.blocks_per_sequence <= self.config.n_blocks:
            return self.config.context
        return self.config.n_blocks * self.config.block_size


@dataclass(frozen=True, slots=True)
class LayerOffsets:
    """Byte offsets into the arena. A part that the codec does not have is empty: the next one has the same offset."""

    k: int
    v: int
    k_scale: int
    v_scale: int
    k_tail: int
    v_tail: int
    k_tail_scale: int
    v_tail_scale: int
    end: int


@dataclass(frozen=True, slots=True)
class Plan:
    strategy: Strategy
    layout: Layout
    codec: CodecPair
    groups: tuple[Group, ...]
    offsets: tuple[LayerOffsets, ...]  # by layer
    max_seqs: int

    @property
    def tail_blocks(self) -> int:
        """Blocks of each layer's tail, if the codec has one."""
        return TAIL_TILES * self.max_seqs

    @property
    def nbytes(self) -> int:
        return self.offsets[-1].end

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return self.groups[0].config.context

    @property
    def max_chunk(self) -> int:
        """Most tokens of one sequence in one step."""
        return self.groups[0].config.max_chunk

    @property
    def ahead(self) -> int:
        """Tokens of a sequence that may be computed before they are committed."""
        return self.groups[0].config.ahead

    @property
    def tile(self) -> int:
        """Cells are reused this many tokens at a time."""
        return self.groups[0].config.tile

    @property
    def n_layers(self) -> int:
        return len(self.offsets)

    def read_bytes(self, step: Step) -> int:
        """Bytes that attention reads in this step, over all layers. A key counts once per sequence, not per query. With
        a tail, the keys in the tiles of the queries count as int8 rows, and those before the last tile as cells."""
        total = 0
        for group, changes in zip(self.groups, step.groups, strict=True):
            if group.tail is None and group.config.spec.window is None:  # every key of every sequence
                total += len(group.layers) * sum(changes.kv_len) * sum(group.parts.token_bytes)
                continue
            for length, n in zip(changes.kv_len, step.n_new, strict=True):
                total += len(group.layers) * group.read_bytes(length - n, length)
        return total

    def group_of(self, layer: int) -> int:
        return next(index for index, group in enumerate(self.groups) if layer in group.layers)

    @property
    def n_blocks(self) -> int:
        return sum(group.config.n_blocks for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """All layers, with scales and repeated heads, without tails."""
        return sum(group.bytes_per_token for group in self.groups)


def plan(config: CacheConfig, default_layout: str = "token-major") -> Plan:
    strategy = resolve(config.strategy, config.context, config.max_seqs)
    codec = codecs_of(config.codec)
    specs = _effective_specs(config, strategy)
    block_size = _block_size(config, strategy, codec)
    layout = _layout(config, strategy, specs, block_size, default_layout)
    placement = PLACEMENTS[strategy.placement]

    drafts = []
    for spec, layers in groups(specs):
        chunk = min(config.max_chunk, config.context)
        tile = codec.tail or 1
        group = GroupConfig(spec, block_size, 0, config.context, chunk, config.watermarks, config.ahead, tile)
        parts = parts_of(layout, codec, spec, block_size)
        tail = parts_of(layout, codec.tails, spec, codec.tail) if codec.tail else None
        drafts.append(Group(tuple(layers), group, parts, placement.blocks_per_sequence(group), tail))
    sized = tuple(_with_blocks(g, n) for g, n in zip(drafts, _counts(config, strategy, drafts), strict=True))
    offsets = _offsets(sized, config.max_seqs)
    if config.cache_bytes is not None and offsets[-1].end > config.cache_bytes:  # alignment exceeds the budget
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


def _block_size(config: CacheConfig, strategy: Strategy, codec: CodecPair) -> int:
    size = config.block_size
    if size is None:
        # Rounding up to whole panels costs little, and then every layout accepts the block.
        return align(config.context, DEFAULT_BLOCK) if strategy.one_page else DEFAULT_BLOCK
    if size < SMALLEST_BLOCK or size & (size - 1):
        raise KvarnError(f"block size {size}: it must be a power of two from {SMALLEST_BLOCK}")
    if size < codec.tail:  # a block would be shared before its cells are made
        raise KvarnError(f"block size {size}: {codec.name} cells are made {TILE} tokens at a time; use {TILE} or more")
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
            if name is None:  # the backend's default does not fit: head-major always does
                return LAYOUTS["head-major"]
            raise KvarnError(f"the {layout.name} layout does not fit: {refusal}")
    return layout


def _counts(config: CacheConfig, strategy: Strategy, drafts: Sequence[Group]) -> list[int]:
    """Blocks per group. With a byte budget, groups with a window get their blocks first, the others get the rest."""
    wanted = [g.blocks_per_sequence * config.max_seqs for g in drafts]
    if config.cache_bytes is None:
        return wanted
    tails = config.max_seqs * sum(g.tail_bytes for g in drafts)
    cost = [len(g.layers) * g.parts.block_bytes for g in drafts]
    if not PLACEMENTS[strategy.placement].on_demand:  # a sequence takes all its blocks at once
        sequence = sum(g.blocks_per_sequence * c for g, c in zip(drafts, cost, strict=True))
        n = min((config.cache_bytes - tails) // sequence, config.max_seqs)
        _ensure_fits(n > 0, config, tails + sequence, f"one sequence of {config.context} tokens")
        return [g.blocks_per_sequence * n for g in drafts]
    bounded = [g.blocks_per_sequence < g.config.context_blocks for g in drafts]
    windows = sum(n * c for n, c, fixed in zip(wanted, cost, bounded, strict=True) if fixed)
    row = sum(c for c, fixed in zip(cost, bounded, strict=True) if not fixed)
    rest = config.cache_bytes - tails - windows
    what = f"the windows of {counted(config.max_seqs, 'sequence')} and one block more"
    _ensure_fits(rest >= row, config, tails + windows + row, what)
    return [n if fixed else rest // row for n, fixed in zip(wanted, bounded, strict=True)]


def _ensure_fits(fits: bool, config: CacheConfig, needed: int, what: str) -> None:
    if not fits:
        raise OutOfMemory(
            f"the cache budget is {config.cache_bytes:,} bytes and {what} need {needed:,}: "
            "raise the budget, or lower the context, the window or the number of sequences"
        )


def _with_blocks(group: Group, n_blocks: int) -> Group:
    return replace(group, config=replace(group.config, n_blocks=n_blocks))


def _offsets(sized: Sequence[Group], max_seqs: int) -> tuple[LayerOffsets, ...]:
    group_of = {layer: group for group in sized for layer in group.layers}
    offsets, at = [], 0
    for layer in sorted(group_of):
        group = group_of[layer]
        sizes = [group.config.n_blocks * part.block_bytes for part in group.parts.each]
        sizes += [TAIL_TILES * max_seqs * part.block_bytes for part in group.tail.each] if group.tail else [0] * 4
        starts = [at]
        for size in sizes:
            starts.append(starts[-1] + align(size, ALIGNMENT))
        offsets.append(LayerOffsets(*starts))
        at = starts[-1]
    return tuple(offsets)
