"""The kernels and their specialisations. This module needs neither Triton nor a GPU.

A kernel is a Triton function in kernels/, in a file of its own name. A Kernel is one specialisation of
it: the types of its arguments and the values of its constants. Everything that affects its machine code
is a field, so the digest of a Kernel (store.py) names its binary. `catalogue` lists all of them: what a
release contains, and what tests compile.

Names of types are Triton's. C is the type of plain cells, F the type in which a matrix takes its input (and in
which the matrix is stored).
"""

from dataclasses import dataclass
from functools import cache

from kvarn.backends.cuda.planes import KINDS, PACKED, Planes
from kvarn.backends.cuda.tiling import DEPTH, LOWEST, MOST_SPLITS, NARROWEST, Tile, tiles

Constant = int | float | str

TYPES = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}  # of matrices and of plain cells
CODED = ("int8", "int6", "int4")  # cells that are codes; they are multiplied in bf16
CODEC_CODES = {"bf16": 2, "int8": 3, "int4": 4, "int6": 5}  # of what a pair K/V may have, for kernels
TYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
ACTIVATION_CODES = {"silu": 1, "gelu": 2}  # of gates in a product; 0: none
FORM_CODES = {"f32": 0, "f16": 1, "bf16": 2}  # for kernels that learn the form of their output at run time
AS_STORED = {"F32": "f32", "F16": "f16", "BF16": "bf16"}  # matrices of these types are multiplied as they are stored
HEAD_DIMS = (64, 128, 256)  # a head is padded to one of these in registers; memory is not padded
LARGEST_HEAD = HEAD_DIMS[-1]
SHORT_ROW = LARGEST_HEAD // 32  # bytes of a row of scales, which need not be whole words
HEAD_MULTIPLE = 8  # the dimension of a head must be a multiple of this

SPLIT = 256  # tokens of a sequence that are summed up by themselves, at absolute positions: a part of the arithmetic
GROUP_ROWS = 16  # query heads of a KV head that one program of `decode` computes
ROTATED_HEADS = 8  # of a token, that a program of `rotate` computes
REDUCED = 32  # numbers of a head that a program of `reduce` adds
DEEP = 16  # splits that it loads at a time, if there are no more
MOST_ADDED = 64  # and if there are
MOST_OF_SPLITS = 8  # that a program of `decode` takes
DECODING = 2  # programs of `decode` that a processor runs together
PREFILL_ROWS = 64  # query rows of a program of `prefill`
ROWS = 256  # workspaces have a multiple of this many rows
COLUMNS = 256  # matrices are padded to a multiple of this many rows (columns of the output)
ROW_GROUP = 8  # row tiles that take turns over one tile of weights, while it is in the device's cache
GATED_MULTIPLE = 16  # numbers of gate and of up must be a multiple of this, or they are gated by a kernel of its own
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
def embed() -> Kernel:
    text = "tokens:*i32 sampled:*i32 weight:*fp32 out:*fp32 width:i32 weight_stride:i64 scale:fp32 form:i32"
    return Kernel("embed", _arguments(text), (("BLOCK", STRETCH), EARLY))


@cache
def norm() -> Kernel:
    text = "x:*fp32 weight:*fp32 out:*fp32 width:i32 x_stride:i32 out_stride:i32 eps:fp32 form:i32"
    return Kernel("norm", _arguments(text), (("BLOCK", ROW_STRETCH), EARLY), warps=8)


@cache
def norm_add() -> Kernel:
    text = "x:*fp32 weight:*fp32 into:*fp32 width:i32 x_stride:i32 into_stride:i32 eps:fp32"
    return Kernel("norm_add", _arguments(text), (("BLOCK", ROW_STRETCH), EARLY), warps=8)


GATING = "apart:i32 gated:i32 half:i32 form:i32 factor:fp32"


@cache
def total() -> Kernel:
    text = (
        "partial:*fp32 bias:*fp32 out:*fp32 n_rows:i32 n_columns:i32 out_stride:i32 scale:fp32 biased:i32 adds:i32 "
        "splits:i32 bm:i32 bn:i32"
    )
    constants = (("BLOCK", STRETCH), ("UNIT", NARROWEST), ("MANY", MOST_SPLITS), ("GROUP", ROW_GROUP), EARLY)
    return Kernel("total", _arguments(text), constants, (("bm", LOWEST), ("bn", NARROWEST)))


@cache
def linear(form: str, tile: Tile, mode: str) -> Kernel:
    """mode: `whole` for one split, `shared` for a program per split, `turns` for one program with all splits. A
    `shared` one also computes one split."""
    text = (
        "x:*F weight:*F bias:*fp32 out:*fp32 partial:*fp32 counters:*i32 n_rows:i32 n_columns:i32 depth:i32 "
        "out_stride:i32 scale:fp32 biased:i32 adds:i32 splits:i32 share:i32 "
        f"{GATING}"
    )
    sizes = (("BM", tile.rows), ("BN", tile.columns), ("BK", tile.depth), ("DEPTH", DEPTH), ("GROUP", ROW_GROUP))
    constants = (*sizes, ("AHEAD", PREFETCHED), ("MODE", mode), EARLY)
    aligned = (("depth", DEPTH), ("half", GATED_MULTIPLE))
    return Kernel("linear", _arguments(text, F=TYPES[form]), constants, aligned, tile.warps, tile.stages)


@cache
def linear_packed(planes: Planes, tile: Tile, mode: str) -> Kernel:
    """Modes are those of `linear`."""
    text = (
        "x:*fp16 codes:*u16 headers:*u32 bias:*fp32 out:*fp32 partial:*fp32 counters:*i32 n_rows:i32 n_columns:i32 "
        "padded:i32 depth:i32 units:i32 out_stride:i32 scale:fp32 biased:i32 adds:i32 splits:i32 share:i32 "
        f"{GATING}"
    )
    kind = (("BITS", planes.bits), ("FIELD", planes.field), ("OFFSETS", int(planes.offsets)))
    sizes = (("BLOCKS", planes.blocks), ("SPAN", planes.span), ("BM", tile.rows), ("BN", tile.columns))
    constants = (*kind, *sizes, ("DEPTH", DEPTH), ("GROUP", ROW_GROUP), ("MODE", mode), EARLY)
    aligned = (("padded", COLUMNS), ("depth", DEPTH), ("half", GATED_MULTIPLE))
    return Kernel("linear_packed", _arguments(text), constants, aligned, tile.warps, tile.stages)


@cache
def embed_packed() -> Kernel:
    text = (
        "tokens:*i32 sampled:*i32 codes:*u16 headers:*u32 out:*fp32 width:i32 padded:i32 units:i32 bits:i32 field:i32 "
        "offsets:i32 blocks:i32 span:i32 tiles:i32 words:i32 scale:fp32"
    )
    return Kernel("embed_packed", _arguments(text), (("BLOCK", STRETCH), EARLY))


@cache
def gate() -> Kernel:
    text = (
        "gate:*fp32 up:*fp32 out:*fp32 width:i32 gate_stride:i32 up_stride:i32 out_stride:i32 scale:fp32 "
        "activation:i32 form:i32"
    )
    return Kernel("gate", _arguments(text), (("BLOCK", STRETCH), EARLY), warps=8)


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


CELLS = "row_block:i64 row_head:i64 row_slot:i64"  # strides of blocks, heads and slots, counted in rows
TAIL = "k_tail:*i8 v_tail:*i8 k_tail_scale:*fp32 v_tail_scale:*fp32"  # int8 rows of the tiles that are being filled
NEW = "k_new:*i8 v_new:*i8 k_new_scale:*fp32 v_new_scale:*fp32"  # those of a step, before they are in the tail
TAIL_CELLS = "tail_block:i64 tail_head:i64 tail_slot:i64"
CODECS = "k_codec:i32 v_codec:i32"  # CODEC_CODES
HEADS = (
    "q:*fp32 k:*fp32 v:*fp32 q_stride:i32 k_stride:i32 v_stride:i32 q_norm:*fp32 k_norm:*fp32 k_centre:*fp32 "
    "cos:*fp32 sin:*fp32 cells:*i32"
)
NORMS = "q_normed:i32 k_normed:i32 k_centred:i32 eps:fp32"
_WIDTHS = (("k_width", HEAD_MULTIPLE), ("v_width", HEAD_MULTIPLE))


@cache
def rotate(codec: str) -> Kernel:
    """For plain cells."""
    text = (
        f"{HEADS} q_out:*C k_cells:*C v_cells:*C n_heads:i32 n_kv_heads:i32 copies:i32 dim:i32 half:i32 "
        f"block_size:i32 {CELLS} {NORMS}"
    )
    return Kernel("rotate", _arguments(text, C=TYPES[codec]), (("HEADS", ROTATED_HEADS), ("BD", LARGEST_HEAD), EARLY))


@cache
def encode() -> Kernel:
    """For all other cells."""
    text = (
        f"{HEADS} places:*i32 q_out:*bf16 k_cells:*u8 v_cells:*u8 k_scale:*u8 v_scale:*u8 {TAIL} {NEW} near:i32 "
        "n_heads:i32 n_kv_heads:i32 copies:i32 dim:i32 k_width:i32 v_width:i32 half:i32 block_size:i32 "
        f"{CELLS} {TAIL_CELLS} {CODECS} {NORMS}"
    )
    return Kernel("encode", _arguments(text), (("HEADS", ROTATED_HEADS), ("BD", LARGEST_HEAD), EARLY), _WIDTHS)


@cache
def pack() -> Kernel:
    text = (
        f"positions:*i32 rows:*i32 cells:*i32 places:*i32 k_cells:*u8 v_cells:*u8 k_scale:*u8 v_scale:*u8 {TAIL} {NEW} "
        f"near:i32 n_heads:i32 k_width:i32 v_width:i32 block_size:i32 {CELLS} {TAIL_CELLS} {CODECS}"
    )
    return Kernel("pack", _arguments(text), (EARLY,), _WIDTHS)


@cache
def keep() -> Kernel:
    text = f"kept:*i32 {TAIL} {NEW} n_heads:i32 k_width:i32 v_width:i32 {TAIL_CELLS} {CODECS}"
    return Kernel("keep", _arguments(text), (("BD", LARGEST_HEAD), EARLY), _WIDTHS, warps=1)


ATTENTION = (
    f"q:*Q k:*C v:*C k_scale:*u8 v_scale:*u8 {TAIL} table:*i32 shifts:*i32 rows:*i32 positions:*i32 table_width:i32 "
    f"n_heads:i32 group:i32 dim:i32 k_width:i32 v_width:i32 block_size:i32 {CELLS} {TAIL_CELLS} {CODECS} "
    "window:i32 pinned:i32 pinned_blocks:i32 scale:fp32"
)


def head_block(dim: int) -> int:
    return next(each for each in HEAD_DIMS if dim <= each)


def cells_of(codec: str, dim: int) -> str:
    """What the kernels of attention are compiled for: the name of a codec, or `any` pair of those in CODEC_CODES. int6
    and int4 have no kernels of their own: on an H200, those of decode and prefill differed in their bits. Large heads
    are rare, so int8 has none for them."""
    return codec if codec in TYPES or (codec == "int8" and head_block(dim) < LARGEST_HEAD) else "any"


def _for_codec(codec: str, text: str) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, Constant], ...]]:
    """Arguments, and constants for keys and values."""
    if codec in TYPES:
        return _arguments(text, Q=TYPES[codec], C=TYPES[codec]), (("KEYS", "plain"), ("VALUES", "plain"))
    return _arguments(text, Q="bf16", C="u8"), (("KEYS", codec), ("VALUES", codec))


def _tile(codec: str, block: int) -> int:
    """Keys of a tile: a part of the arithmetic, and what fits the shared memory of every target."""
    if codec == "f32":
        return 32
    return 64 if block == LARGEST_HEAD else 128


def decode_programs(n_splits: int, heads: int, processors: int) -> int:
    """Programs of `decode` that share the splits of a token and head; `heads` counts those of all tokens. As many as
    fill the device, and more if one would have more than MOST_OF_SPLITS: tokens differ in how many they see."""
    return max(-(-n_splits // MOST_OF_SPLITS), min(DECODING * processors // heads, n_splits), 1)


_ALIGNED = (("dim", HEAD_MULTIPLE), ("out_stride", HEAD_MULTIPLE), *_WIDTHS)


@cache
def decode(codec: str, dim: int) -> Kernel:
    block, codec = head_block(dim), cells_of(codec, dim)
    given = "tokens:*i32 first_token:i32 n_splits:i32 partial:*fp32 ends:*fp32 out:*fp32 out_stride:i32 form:i32"
    arguments, kinds = _for_codec(codec, f"{ATTENTION} {given}")
    sizes = (("BD", block), ("TILE", _tile(codec, block)), ("SPLIT", SPLIT), ("BM", GROUP_ROWS))
    return Kernel("decode", arguments, (*kinds, *sizes, EARLY), _ALIGNED, stages=2)


@cache
def prefill(codec: str, dim: int) -> Kernel:
    block, codec = head_block(dim), cells_of(codec, dim)
    rows = 16 if codec == "f32" else 32 if block == LARGEST_HEAD else PREFILL_ROWS
    arguments, kinds = _for_codec(codec, f"{ATTENTION} {NEW} starts:*i32 counts:*i32 out:*fp32 out_stride:i32 form:i32")
    sizes = (("BD", block), ("TILE", _tile(codec, block)), ("SPLIT", SPLIT), ("BM", rows))
    return Kernel("prefill", arguments, (*kinds, *sizes, EARLY), _ALIGNED, stages=1)


@cache
def reduce(deep: bool) -> Kernel:
    """deep: for many splits, of which more are loaded at a time."""
    text = (
        "partial:*fp32 ends:*fp32 tokens:*i32 out:*fp32 n_splits:i32 n_heads:i32 dim:i32 width:i32 out_stride:i32 "
        "form:i32 turned:i32 held:i32"
    )
    constants = (("PIECE", REDUCED), ("MANY", MOST_ADDED if deep else DEEP), EARLY)
    aligned = (*((name, HEAD_MULTIPLE) for name in ("dim", "width", "out_stride")), ("held", HEAD_DIMS[0]))
    return Kernel("reduce", _arguments(text), constants, aligned, warps=1)


@cache
def copy() -> Kernel:
    text = f"moves:*i32 arena:*i8 parts:*i64 {CELLS}"
    return Kernel("copy", _arguments(text), (("SLOTS", 16), ("WORDS", LARGEST_HEAD), ("BYTES", SHORT_ROW)))


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
    found = [add(), angles(), edit(), norm_add(), select(), embed_packed(), copy()]
    found += [embed(), norm(), gate(), total(), encode(), pack(), keep()]
    found += [peak(), choose(), adjust(), weigh(), starts(), scatter(), draw()]
    found += [reduce(deep) for deep in (False, True)]
    found += [linear_packed(planes, *tile) for planes in KINDS for tile in tiles("packed")]
    for kind in TYPES:
        found += [rotate(kind)]
        found += [linear(kind, *tile) for tile in tiles(kind)]
    pairs = [(each, dim) for each in (*TYPES, "int8", "any") for dim in HEAD_DIMS]
    found += [make(*pair) for pair in pairs for make in (decode, prefill)]
    return tuple(dict.fromkeys(found))
