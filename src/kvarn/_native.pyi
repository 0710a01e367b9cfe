from enum import Enum, IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

def cpu_features() -> list[str]: ...
def isas() -> list[str]: ...
def isa() -> str: ...
def sum_order() -> str: ...
def select_sum_order(tiles: bool) -> None: ...
def finish_unlocked() -> None: ...
def select_isa(name: str) -> bool: ...
def encode_bf16(x: NDArray[np.float32], out: NDArray[np.uint16]) -> None: ...
def encode_f16(x: NDArray[np.float32], out: NDArray[np.uint16]) -> None: ...
def encode_int8(x: NDArray[np.float32], out: NDArray[np.int8], scale: NDArray[np.float32]) -> None: ...
def encode_int4(
    x: NDArray[np.int8], x_scale: NDArray[np.float32], out: NDArray[np.uint32], scale: NDArray[np.uint8]
) -> None: ...
def encode_int6(
    x: NDArray[np.int8], x_scale: NDArray[np.float32], out: NDArray[np.uint32], scale: NDArray[np.uint8]
) -> None: ...
def arena(bytes: int) -> NDArray[np.uint8]: ...
def read_bandwidth(bytes: int, threads: int) -> float: ...
def exp(x: NDArray[np.float64], out: NDArray[np.float64]) -> None: ...
def log(x: NDArray[np.float64], out: NDArray[np.float64]) -> None: ...
def sin_cos(x: NDArray[np.float64], sin: NDArray[np.float64], cos: NDArray[np.float64]) -> None: ...
def dots(pool: Pool, a: NDArray[np.float32], b: NDArray[np.float32], out: NDArray[np.float32]) -> None: ...
def thread_counts(most: int) -> list[int]: ...
def weigh(
    weights: NDArray[np.float32], seen: NDArray[np.bool_], v: NDArray[np.float32], out: NDArray[np.float32]
) -> None: ...

GROUP_ROWS: int  # output rows that kernels compute together
LARGE_PAGE: int  # bytes
SHARED_PAGES: int  # bytes of a mapping that small matrices share
ALONE: int  # from so many bytes on, a matrix has its own mapping

class Codec(IntEnum):
    f32 = 0
    f16 = 1
    bf16 = 2
    int8 = 3
    int4 = 4
    int6 = 5

class Gate(Enum):
    silu = 0
    gelu = 1

class Pool:
    def __init__(self, threads: int) -> None: ...
    @property
    def size(self) -> int: ...

class Fastest:
    def __init__(self, variants: int, pause: int, longest: int) -> None: ...
    def next(self, tokens: int, keys: int) -> int: ...
    def took(self, ns: int) -> None: ...

class PackedMatrix:
    @property
    def kind(self) -> str: ...
    @property
    def integer(self) -> bool: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def unpack(self, out: NDArray[np.float32]) -> None: ...

def pack(
    pool: Pool, type: str, rows: NDArray[np.uint8], cols: int, grid: NDArray[np.int8] | None = None
) -> PackedMatrix: ...
def pack_file(
    pool: Pool, type: str, file: int, offset: int, rows: int, cols: int, grid: NDArray[np.int8] | None = None
) -> PackedMatrix: ...
def outline(type: str, rows: int, cols: int) -> PackedMatrix: ...
def zeros(type: str, rows: int, cols: int) -> PackedMatrix: ...
def largest_scales(type: str, rows: NDArray[np.uint8]) -> tuple[float, float]: ...
def pack_planes(
    type: str,
    rows: NDArray[np.uint8],
    power: int,
    codes: NDArray[np.uint16],
    row: int,
    headers: NDArray[np.uint32],
    column: int,
) -> None: ...

class FreshRows:
    def __init__(self) -> None: ...

class CacheView:
    def __init__(self) -> None: ...
    def add_group(
        self,
        blocks: NDArray[np.int32],
        first: NDArray[np.int32],
        n_blocks: NDArray[np.int32],
        kv_len: NDArray[np.int32],
        q_start: NDArray[np.int32],
        n_heads: int,
        n_kv_heads: int,
        window: int,
        pinned: int,
        /,
    ) -> None: ...
    def add_layer(
        self,
        k: NDArray[Any],
        v: NDArray[Any],
        k_scale: NDArray[Any] | None,
        v_scale: NDArray[Any] | None,
        k_tail: NDArray[Any] | None,
        v_tail: NDArray[Any] | None,
        k_tail_scale: NDArray[np.float32] | None,
        v_tail_scale: NDArray[np.float32] | None,
        k_codec: int,
        v_codec: int,
        dim: int,
        group: int,
    ) -> None: ...
    def set_cells(self, group: int, cells: NDArray[np.int64], /) -> None: ...
    def write(self, layer: int, k: NDArray[np.float32], v: NDArray[np.float32], fresh: FreshRows, /) -> int: ...

def attend(
    pool: Pool,
    cache: CacheView,
    layer: int,
    q: NDArray[np.float32],
    out: NDArray[np.float32],
    scale: float,
    prefill: bool,
    decode: bool,
    fresh: FreshRows,
) -> int: ...

Vector = NDArray[np.float32] | None

class Program:
    def __init__(self, pool: Pool) -> None: ...
    def buffer(self, width: int, /) -> int: ...
    def rope(self, frequencies: list[float], magnitude: float, /) -> int: ...
    def embed(self, name: str, matrix: PackedMatrix, out: int, scale: float, /) -> None: ...
    def norm_round(
        self,
        name: str,
        wanted_rows_only: bool,
        in_: int,
        out: int,
        weight: Vector,
        eps: float,
        needs_int8: bool,
        needs_bf16: bool,
    ) -> None: ...
    def gated(
        self,
        name: str,
        wanted_rows_only: bool,
        gate: int,
        up: int,
        out: int,
        kind: Gate,
        needs_int8: bool,
        needs_bf16: bool,
        /,
    ) -> None: ...
    def norm_add(
        self, name: str, wanted_rows_only: bool, in_: int, out: int, weight: Vector, eps: float, /
    ) -> None: ...
    def add(self, name: str, wanted_rows_only: bool, in_: int, out: int, /) -> None: ...
    def select(self, name: str, in_: int, out: int, /) -> None: ...
    def linear(
        self, name: str, wanted_rows_only: bool, logits: bool, segments: list[tuple[PackedMatrix, Vector, int, bool]], /
    ) -> None: ...
    def attention(
        self,
        name: str,
        layer: int,
        q: int,
        k: int,
        v: int,
        out: int,
        scale: float,
        rope: int,
        shape: tuple[int, int, int],
        q_norm: Vector,
        k_norm: Vector,
        centre: Vector,
        eps: float,
    ) -> None: ...
    def run(
        self,
        cache: CacheView,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int32],
        rows: NDArray[np.int64],
        logits: NDArray[np.float32],
        /,
    ) -> tuple[int, int, int, int, int, int]: ...
    def hidden(self, out: NDArray[np.float32], /) -> None: ...
    def reserve(self, tokens: int, /) -> None: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def workspace(self) -> int: ...
    def workspace_for(self, tokens: int, sequences: int, keys: int, block: int, tails: int, /) -> int: ...
    def trace(self, on: bool, /) -> None: ...
    def timings(self) -> list[tuple[str, int, int]]: ...

class Markers:
    def __init__(self, texts: list[str], ids: list[int], always: list[bool], strips_right: list[bool]) -> None: ...
    def split(self, text: bytes, special: bool) -> list[tuple[int, int, int]]: ...

class Spm:
    def __init__(
        self,
        tokens: list[str],
        scores: NDArray[np.float32],
        texts: list[str],
        ids: list[int],
        always: list[bool],
        strips_right: list[bool],
        space_prefix: bool,
        unknown: int,
    ) -> None: ...
    def encode(self, text: bytes, special: bool) -> list[int]: ...
