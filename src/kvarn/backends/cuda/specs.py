"""The kernels and their specialisations. This module needs neither Triton nor a GPU.

A kernel is a Triton function in kernels/, in a file of its own name. A Kernel is one specialisation of
it: the types of its arguments and the values of its constants. Everything that affects its machine code
is a field, so the digest of a Kernel (store.py) names its binary. `catalogue` lists all of them: what a
release contains, and what tests compile.

Names of types are Triton's. C is the type of cells, F the type in which a matrix takes its input (and in
which the matrix is stored).
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from kvarn.backends.cuda.planes import KINDS, PACKED, Planes

Constant = int | float | str

TYPES = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}  # of matrices and of cells
TYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
FORM_CODES = {"f32": 0, "f16": 1, "bf16": 2}  # for kernels that learn the form of their output at run time
AS_STORED = {"F32": "f32", "F16": "f16", "BF16": "bf16"}  # matrices of these types are multiplied as they are stored
HEAD_DIMS = (64, 128, 256)  # a head is padded to one of these in registers; memory is not padded
LARGEST_HEAD = HEAD_DIMS[-1]
HEAD_MULTIPLE = 8  # the dimension of a head must be a multiple of this

SPLIT = 256  # tokens of a sequence that are summed up by themselves, at absolute positions: a part of the arithmetic
GROUP_ROWS = 16  # query heads of a KV head that one program of `decode` computes
ROTATED_HEADS = 8  # of a token, that a program of `rotate` computes
REDUCED = 32  # numbers of a head that a program of `reduce` adds, if there are many splits
DEEP = 64  # so many splits
MOST_OF_SPLITS = 8  # that a program of `decode` takes
DECODING = 2  # programs of `decode` that a processor runs together
PREFILL_ROWS = 64  # query rows of a program of `prefill`
ROWS = 256  # workspaces have a multiple of this many rows
COLUMNS = 256  # matrices are padded to a multiple of this many rows (columns of the output)
DEPTH = 128  # matrices and their inputs are padded to a multiple of this many columns
SHARED_ROWS = 256  # most rows of a product whose splits are computed by several programs
ROW_GROUP = 8  # row tiles that take turns over one tile of weights, while it is in the device's cache
FILLED = {"plain": 264, "packed": 396}  # programs that keep a large device busy with one row; packed ones are small
LEAST_SPLIT = {"plain": 1024, "packed": 512}  # numbers of a split of the depth
MOST_SPLITS = 8
WIDE = 16384  # rows of a matrix that has enough large tiles for one row of them
GATE_SCALE = {"f32": 1.0, "f16": 2.0**-6, "bf16": 1.0}  # what outputs of gates are multiplied by, for their range
STRETCH = 1024  # numbers that a program of an elementwise kernel computes
ROW_STRETCH = 4096  # numbers of a row that a norm takes at a time
PEAK_PART = 4096  # tokens of a program of `peak`
BUCKETS = 2048  # of tokens with similar scores, for draws
SETTINGS = 8  # numbers of a draw
PREFETCHED = 256  # numbers of each column of a tile that are on their way before the inputs are there
EARLIEST = 90  # the first target whose kernels may start before the one before them has ended
EARLY = ("EARLY", 1)  # the constant of such kernels


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str  # of the function, and of its file in kernels/
    arguments: tuple[tuple[str, str], ...]  # (name, type) in order, without the constants
    constants: tuple[tuple[str, Constant], ...]  # (name, value), after the arguments
    aligned: tuple[tuple[str, int], ...] = ()  # integer arguments that are multiples of a power of two
    warps: int = 4
    stages: int = 1

    def size(self, name: str) -> int:
        """A constant that is a size, such as BM."""
        return int(dict(self.constants)[name])

    @property
    def title(self) -> str:
        """For people: `linear bf16 BM 16`."""
        kinds = dict.fromkeys(kind.removeprefix("*") for _, kind in self.arguments if kind[0] == "*")
        kinds.pop("i32", None)
        sizes = (f"{name} {value}" for name, value in self.constants)
        return " ".join((self.name, *kinds, *sizes))


def form_of(stored: str) -> str:
    """The type in which a matrix of this stored type takes its input. All but packed ones are stored in it."""
    return AS_STORED.get(stored, "f16")


def product_of(stored: str) -> str:
    """Matrices of types with the same name here can be one product."""
    return PACKED[stored].name if stored in PACKED else form_of(stored)


def _arguments(text: str, **types: str) -> tuple[tuple[str, str], ...]:
    """'x:*F n:i32' with F="bf16" -> (("x", "*bf16"), ("n", "i32"))."""
    pairs = []
    for word in text.split():
        name, kind = word.split(":")
        star, kind = ("*", kind[1:]) if kind[0] == "*" else ("", kind)
        pairs.append((name, star + types.get(kind, kind)))
    return tuple(pairs)


@cache
def embed(weight: str) -> Kernel:
    text = "tokens:*i32 sampled:*i32 weight:*F out:*fp32 width:i32 weight_stride:i64 scale:fp32"
    return Kernel("embed", _arguments(text, F=TYPES[weight]), (("BLOCK", STRETCH), EARLY))


@cache
def norm(form: str) -> Kernel:
    text = "x:*fp32 weight:*fp32 out:*F width:i32 x_stride:i32 out_stride:i32 eps:fp32"
    return Kernel("norm", _arguments(text, F=TYPES[form]), (("BLOCK", ROW_STRETCH), EARLY), warps=8)


@cache
def norm_add() -> Kernel:
    text = "x:*fp32 weight:*fp32 into:*fp32 width:i32 x_stride:i32 into_stride:i32 eps:fp32"
    return Kernel("norm_add", _arguments(text), (("BLOCK", ROW_STRETCH), EARLY), warps=8)


class Tile(NamedTuple):
    """Of a product: rows, columns and depth of a tile. It has no effect on a bit, and stages are lowered where shared
    memory is small."""

    rows: int
    columns: int
    depth: int  # of a packed one: a unit
    warps: int
    stages: int


class Tiles(NamedTuple):
    """What the products of a kind of matrix choose from."""

    narrow: Tile  # a few rows of a small matrix: more programs
    small: tuple[Tile, ...]
    turns: Tile  # it has two accumulators
    large: Tile | None  # for many rows and one split
    wide_rows: int  # more rows than these have large tiles if the matrix is wide, and more than SHARED_ROWS always


F32_TILE = Tile(16, 32, 32, 4, 1)
PLAIN_TILES = Tiles(
    narrow=Tile(16, 32, 128, 4, 4),
    small=(Tile(16, 64, 128, 4, 4), Tile(32, 64, 128, 4, 4), Tile(64, 64, 128, 4, 3), Tile(128, 64, 64, 4, 4)),
    turns=Tile(256, 64, 64, 8, 4),
    large=Tile(256, 128, 64, 8, 4),
    wide_rows=SHARED_ROWS,
)
PACKED_TILES = Tiles(
    narrow=Tile(8, 64, 0, 2, 5),
    small=(Tile(8, 64, 0, 2, 5), Tile(16, 64, 0, 2, 5), Tile(32, 64, 0, 2, 5), Tile(64, 64, 0, 4, 3)),
    turns=Tile(128, 128, 0, 8, 3),
    large=Tile(128, 256, 0, 8, 3),
    wide_rows=64,
)
TILES = {
    "f32": Tiles(F32_TILE, (F32_TILE,), F32_TILE, None, SHARED_ROWS),
    "f16": PLAIN_TILES,
    "bf16": PLAIN_TILES,
    "packed": PACKED_TILES,
}
NARROWEST = min(tile.columns for each in TILES.values() for tile in (each.narrow, *each.small))


def splits_of(n_rows: int, depth: int, packed: bool = False) -> int:
    """Parts of a matrix's depth that are summed up by themselves: a part of the arithmetic. Only the shape of the
    matrix, and whether it is packed, decide: enough programs for one row, and not too short."""
    kind = "packed" if packed else "plain"
    programs = -(-n_rows // PLAIN_TILES.small[0].columns)
    most = min(FILLED[kind] // programs, depth // LEAST_SPLIT[kind], MOST_SPLITS)
    splits, steps = 1 << max(most, 1).bit_length() - 1, -(-depth // DEPTH)
    while -(-steps // splits) * (splits - 1) >= steps > 1:  # the last one would be empty
        splits //= 2
    return splits


def tile_for(kind: str, rows: int, n_rows: int, splits: int) -> tuple[Tile, str]:
    """The tile of a product of this many input rows with a matrix of `n_rows`, and who adds its splits. `kind` is a
    form, or `packed`."""
    found = TILES[kind]
    if splits > 1 and rows > SHARED_ROWS:
        return found.turns, "turns"
    if splits == 1 and found.large and rows > (found.wide_rows if n_rows >= WIDE else SHARED_ROWS):
        return found.large, "whole"
    few = -(-n_rows // found.small[0].columns) * splits < FILLED["plain"] // 2
    if rows <= found.narrow.rows and few:
        return found.narrow, "shared"
    return next((tile for tile in found.small if rows <= tile.rows), found.small[-1]), "shared"


def tiles(kind: str) -> list[tuple[Tile, str]]:
    """All that `tile_for` chooses from."""
    found = TILES[kind]
    chosen = [(tile, "shared") for tile in (found.narrow, *found.small)] + [(found.turns, "turns")]
    return list(dict.fromkeys(chosen + ([(found.large, "whole")] if found.large else [])))


@cache
def linear(form: str, tile: Tile, mode: str) -> Kernel:
    """mode: `whole` for one split, `shared` for a program per split, `turns` for one program with all splits. A
    `shared` one also computes one split."""
    text = (
        "x:*F weight:*F bias:*fp32 out:*fp32 partial:*fp32 counters:*i32 n_rows:i32 n_columns:i32 depth:i32 "
        "out_stride:i32 scale:fp32 biased:i32 adds:i32 splits:i32 share:i32"
    )
    sizes = (("BM", tile.rows), ("BN", tile.columns), ("BK", tile.depth), ("DEPTH", DEPTH), ("GROUP", ROW_GROUP))
    constants = (*sizes, ("AHEAD", PREFETCHED), ("MODE", mode), EARLY)
    return Kernel("linear", _arguments(text, F=TYPES[form]), constants, (("depth", DEPTH),), tile.warps, tile.stages)


@cache
def linear_packed(planes: Planes, tile: Tile, mode: str) -> Kernel:
    """Modes are those of `linear`."""
    text = (
        "x:*fp16 codes:*u16 headers:*u32 bias:*fp32 out:*fp32 partial:*fp32 counters:*i32 n_rows:i32 n_columns:i32 "
        "padded:i32 depth:i32 units:i32 out_stride:i32 scale:fp32 biased:i32 adds:i32 splits:i32 share:i32"
    )
    kind = (("BITS", planes.bits), ("FIELD", planes.field), ("OFFSETS", int(planes.offsets)))
    sizes = (("BLOCKS", planes.blocks), ("SPAN", planes.span), ("BM", tile.rows), ("BN", tile.columns))
    constants = (*kind, *sizes, ("DEPTH", DEPTH), ("GROUP", ROW_GROUP), ("MODE", mode), EARLY)
    aligned = (("padded", COLUMNS), ("depth", DEPTH))
    return Kernel("linear_packed", _arguments(text), constants, aligned, tile.warps, tile.stages)


@cache
def embed_packed() -> Kernel:
    text = (
        "tokens:*i32 sampled:*i32 codes:*u16 headers:*u32 out:*fp32 width:i32 padded:i32 units:i32 bits:i32 field:i32 "
        "offsets:i32 blocks:i32 span:i32 tiles:i32 words:i32 scale:fp32"
    )
    return Kernel("embed_packed", _arguments(text), (("BLOCK", STRETCH), EARLY))


@cache
def gate(activation: str, form: str) -> Kernel:
    text = "gate:*fp32 up:*fp32 out:*F width:i32 gate_stride:i32 up_stride:i32 out_stride:i32 scale:fp32"
    return Kernel("gate", _arguments(text, F=TYPES[form]), (("ACTIVATION", activation), ("BLOCK", STRETCH), EARLY))


@cache
def add() -> Kernel:
    text = "x:*fp32 into:*fp32 width:i32 x_stride:i32 into_stride:i32"
    return Kernel("add", _arguments(text), (("BLOCK", STRETCH), EARLY))


@cache
def select() -> Kernel:
    text = "rows:*i32 x:*fp32 out:*fp32 width:i32 x_stride:i32 out_stride:i32 form:i32"
    return Kernel("select", _arguments(text), (("BLOCK", STRETCH), EARLY))


@cache
def angles() -> Kernel:
    text = "positions:*i32 turns:*fp64 cos:*fp32 sin:*fp32 half:i32 magnitude:fp32"
    return Kernel("angles", _arguments(text), (("BLOCK", LARGEST_HEAD // 2), EARLY), warps=1)


CELLS = "k_block:i64 k_head:i64 k_slot:i64 v_block:i64 v_head:i64 v_slot:i64"  # strides


@cache
def rotate(codec: str) -> Kernel:
    text = (
        "q:*fp32 k:*fp32 v:*fp32 q_stride:i32 k_stride:i32 v_stride:i32 q_norm:*fp32 k_norm:*fp32 k_centre:*fp32 "
        "cos:*fp32 sin:*fp32 cells:*i32 q_out:*C k_cells:*C v_cells:*C n_heads:i32 n_kv_heads:i32 copies:i32 dim:i32 "
        f"half:i32 block_size:i32 {CELLS} q_normed:i32 k_normed:i32 k_centred:i32 eps:fp32"
    )
    return Kernel("rotate", _arguments(text, C=TYPES[codec]), (("HEADS", ROTATED_HEADS), ("BD", LARGEST_HEAD), EARLY))


ATTENTION = (
    "q:*C k:*C v:*C table:*i32 shifts:*i32 rows:*i32 positions:*i32 table_width:i32 n_heads:i32 group:i32 dim:i32 "
    f"block_size:i32 {CELLS} window:i32 pinned:i32 pinned_blocks:i32 scale:fp32"
)


def head_block(dim: int) -> int:
    return next(each for each in HEAD_DIMS if dim <= each)


def _tile(codec: str, block: int) -> int:
    """Keys of a tile: a part of the arithmetic, and what fits the shared memory of every target."""
    if codec == "f32":
        return 32
    return 64 if block == LARGEST_HEAD else 128


def decode_programs(n_splits: int, heads: int, processors: int) -> int:
    """Programs of `decode` that share the splits of a token and head; `heads` counts those of all tokens. As many as
    fill the device, and more if one would have more than MOST_OF_SPLITS: tokens differ in how many they see."""
    return max(-(-n_splits // MOST_OF_SPLITS), min(DECODING * processors // heads, n_splits), 1)


_ALIGNED = tuple(
    (name, HEAD_MULTIPLE) for name in ("dim", "out_stride", *(word.split(":")[0] for word in CELLS.split()))
)


@cache
def decode(codec: str, dim: int) -> Kernel:
    block = head_block(dim)
    text = f"{ATTENTION} tokens:*i32 n_splits:i32 partial:*fp32 ends:*fp32 out:*fp32 out_stride:i32 form:i32"
    constants = (("BD", block), ("TILE", _tile(codec, block)), ("SPLIT", SPLIT), ("BM", GROUP_ROWS), EARLY)
    return Kernel("decode", _arguments(text, C=TYPES[codec]), constants, _ALIGNED, stages=3)


@cache
def prefill(codec: str, dim: int) -> Kernel:
    block = head_block(dim)
    rows = 16 if codec == "f32" else 32 if block == LARGEST_HEAD else PREFILL_ROWS
    text = f"{ATTENTION} starts:*i32 counts:*i32 out:*fp32 out_stride:i32 form:i32"
    constants = (("BD", block), ("TILE", _tile(codec, block)), ("SPLIT", SPLIT), ("BM", rows), EARLY)
    return Kernel("prefill", _arguments(text, C=TYPES[codec]), constants, _ALIGNED, stages=1)


@cache
def reduce(dim: int, deep: bool) -> Kernel:
    """deep: for many splits, with more programs."""
    text = (
        "partial:*fp32 ends:*fp32 tokens:*i32 out:*fp32 n_splits:i32 n_heads:i32 dim:i32 out_stride:i32 form:i32 "
        "step:i32"
    )
    block = head_block(dim)
    heads, piece, many = (1, REDUCED, 64) if deep else (max(128 // block, 1), block, 32)
    constants = (("HEADS", heads), ("BD", block), ("PIECE", piece), ("MANY", many), ("SOME", 8), EARLY)
    aligned = (("dim", HEAD_MULTIPLE), ("out_stride", HEAD_MULTIPLE))
    return Kernel("reduce", _arguments(text), constants, aligned, warps=1)


@cache
def copy(unit_bytes: int) -> Kernel:
    text = f"moves:*i32 arena:*U offsets:*i64 units:i32 {CELLS}"
    unit = {2: "i16", 4: "i32"}[unit_bytes]
    return Kernel("copy", _arguments(text, U=unit), (("SLOTS", 16), ("BD", LARGEST_HEAD)))


@cache
def edit() -> Kernel:
    return Kernel("edit", _arguments("edits:*i32 table:*i32 n_edits:i32"), (("BLOCK", STRETCH),))


DRAWS = "rows:*i32 logits:*fp32 tokens:*i32 tops:*fp32 settings:*fp64"
_DRAWN = (("SETTINGS", SETTINGS), ("BUCKETS", BUCKETS))


@cache
def peak() -> Kernel:
    text = "rows:*i32 logits:*fp32 peaks:*i64 n_tokens:i32 stride:i32"
    return Kernel("peak", _arguments(text), (("BLOCK", PEAK_PART),))


@cache
def choose() -> Kernel:
    text = "model:*i64 edited:*i64 tokens:*i32 tops:*fp32 n_parts:i32"
    return Kernel("choose", _arguments(text), (("BLOCK", 64),), warps=1)


@cache
def adjust() -> Kernel:
    text = "entries:*i32 biases:*fp64 settings:*fp64 logits:*fp32 n_entries:i32 stride:i32"
    return Kernel("adjust", _arguments(text), (("SETTINGS", SETTINGS), ("BLOCK", STRETCH)))


@cache
def weigh() -> Kernel:
    text = f"draws:*i32 {DRAWS} counts:*i32 masses:*i64 kept:*i64 n_tokens:i32 stride:i32"
    return Kernel("weigh", _arguments(text), (*_DRAWN, ("BLOCK", STRETCH)))


@cache
def starts() -> Kernel:
    return Kernel("starts", _arguments("counts:*i32 cursors:*i32"), (("BUCKETS", BUCKETS),))


@cache
def scatter() -> Kernel:
    text = f"draws:*i32 {DRAWS} cursors:*i32 members:*i32 n_tokens:i32 stride:i32"
    return Kernel("scatter", _arguments(text), (*_DRAWN, ("BLOCK", STRETCH)))


@cache
def draw() -> Kernel:
    text = f"draws:*i32 {DRAWS} counts:*i32 masses:*i64 kept:*i64 members:*i32 stride:i32"
    return Kernel("draw", _arguments(text), (*_DRAWN, ("BLOCK", STRETCH)), warps=8)


def catalogue() -> tuple[Kernel, ...]:
    """All specialisations, each once."""
    found = [add(), angles(), edit(), norm_add(), select(), embed_packed(), copy(2), copy(4)]
    found += [peak(), choose(), adjust(), weigh(), starts(), scatter(), draw()]
    found += [reduce(dim, deep) for dim in HEAD_DIMS for deep in (False, True)]
    found += [linear_packed(planes, *tile) for planes in KINDS for tile in tiles("packed")]
    for kind in TYPES:
        found += [embed(kind), norm(kind), rotate(kind)]
        found += [gate("silu", kind), gate("gelu", kind)]
        found += [linear(kind, *tile) for tile in tiles(kind)]
        found += [make(kind, dim) for dim in HEAD_DIMS for make in (decode, prefill)]
    return tuple(dict.fromkeys(found))
