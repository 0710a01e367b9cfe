"""Tiles of products, and splits of a matrix's depth. This module needs neither Triton nor a GPU.

Splits are a part of the arithmetic, so only the shape of a matrix decides. A tile has no effect on a bit.
"""

from typing import NamedTuple

DEPTH = 128  # matrices and their inputs are padded to a multiple of this many columns
SHARED_ROWS = 256  # most rows of a product whose splits are computed by several programs
APART_ROWS = 32  # with more rows, a kernel of its own adds the splits
FILLED = {"plain": 264, "packed": 396}  # programs that keep a large device busy with one row; packed ones are small
LEAST_SPLIT = {"plain": 1024, "packed": 512}  # numbers of a split of the depth
MOST_SPLITS = 8
WIDE = 16384  # rows of a matrix that has enough large tiles for one row of them


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
_SHARED = [tile for each in TILES.values() for tile in (each.narrow, *each.small)]
NARROWEST, LOWEST = min(tile.columns for tile in _SHARED), min(tile.rows for tile in _SHARED)


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
