"""Packing for a device checks its arguments: it reads and writes nothing outside of them."""

import sys
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from kvarn import native
from kvarn.backends.cuda.planes import PACKED
from kvarn.loading.encodings import ENCODINGS


def zeros(*shape: int, of: type) -> np.ndarray:
    return np.zeros(shape, of)


uint8, uint16, uint32, int8 = (partial(zeros, of=each) for each in (np.uint8, np.uint16, np.uint32, np.int8))


def arguments(**spoiled) -> dict:
    """Twenty rows of 160 columns of Q4_1, which are two units; `spoiled` replaces arguments."""
    codes, headers = uint16(2, 2, 1, 16, 32), uint32(2, 4, 24)
    rows = uint8(20, 100)
    return dict(type="Q4_1", rows=rows, power=0, codes=codes, row=12, headers=headers, column=4) | spoiled


FAR = 2**63 - 1
PLANES = {
    "a type that is not packed": (dict(type="Q3_K"), "of type Q3_K are not packed"),
    "half a block": (dict(rows=uint8(20, 90)), "blocks of 20 bytes"),
    "no blocks": (dict(rows=uint8(20, 0)), "blocks of 20 bytes"),
    "rows of i8": (dict(rows=int8(20, 100)), "contiguous uint8 is needed"),
    "rows with gaps": (dict(rows=uint8(20, 200)[:, ::2]), "strides"),
    "rows of one unit": (dict(rows=uint8(20, 80)), "codes are"),
    "rows of three units": (dict(rows=uint8(20, 180)), "codes are"),
    "another type's tiles": (dict(codes=uint16(2, 2, 2, 16, 32)), "codes are"),
    "groups of 8": (dict(codes=uint16(4, 2, 1, 8, 32)), "codes are"),
    "another span": (dict(codes=uint16(2, 2, 1, 16, 16)), "codes are"),
    "codes of u8": (dict(codes=uint8(2, 2, 1, 16, 32)), "contiguous uint16 is needed"),
    "codes of another rank": (dict(codes=uint16(2048)), "5 dimensions"),
    "another type's words": (dict(headers=uint32(2, 2, 24)), "headers are"),
    "headers of one unit": (dict(headers=uint32(1, 4, 24)), "headers are"),
    "headers with gaps": (dict(headers=uint32(2, 4, 48)[..., ::2]), "strides"),
    "a row too many": (dict(row=13), "20 rows do not fit codes at row 13"),
    "a row below 0": (dict(row=-1), "at row -1"),
    "a row far away": (dict(row=FAR), "do not fit codes"),
    "a column too many": (dict(column=5), "20 rows do not fit headers at column 5"),
    "a column below 0": (dict(column=-1), "at column -1"),
    "a column far away": (dict(column=FAR), "do not fit headers"),
    "a power too large": (dict(power=101), "a power of 101"),
    "a power too small": (dict(power=-101), "a power of -101"),
}


@pytest.mark.parametrize(("spoiled", "message"), PLANES.values(), ids=PLANES)
def test_planes_that_do_not_fit_are_refused(spoiled: dict, message: str) -> None:
    native.pack_planes(**arguments())
    with pytest.raises(ValueError, match=message):
        native.pack_planes(**arguments(**spoiled))


@pytest.mark.parametrize("type_name", PACKED)
def test_planes_at_the_ends_of_their_memory(type_name: str) -> None:
    """`make sanitize` watches what is read and written."""
    encoding, kind = ENCODINGS[type_name], PACKED[type_name]
    for blocks in (1, 2, 3):
        units = kind.units(blocks * encoding.block_size)
        rows = np.full((17, blocks * encoding.block_bytes), 255, np.uint8)
        codes = uint16(2, units, kind.tiles, 16, kind.span)
        headers = uint32(units, kind.words, 17)
        native.pack_planes(type_name, rows, 0, codes, 15, headers, 0)
        assert codes[0, 0, 0, :15].max() == codes[0, -1, -1, :15].max() == 0
        assert codes[0, 0, 0, 15].min() > 0
        assert codes[1, 0, 0].min() > 0
        assert (headers[0, 0] != 0).all()


@pytest.mark.parametrize(
    ("type_name", "rows", "message"),
    [
        ("F16", uint8(2, 4), "of type F16 are not packed"),
        ("Q8_0", uint8(2, 33), "blocks of 34 bytes"),
        ("Q8_0", uint8(34), "2 dimensions"),
    ],
)
def test_scales_of_no_blocks_are_refused(type_name: str, rows: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.largest_scales(type_name, rows)
    assert native.largest_scales("Q8_0", uint8(0, 34)) == (0, 0)


@pytest.mark.parametrize(
    "call",
    [lambda: native.pack_planes(**arguments()), lambda: native.largest_scales("Q4_1", uint8(20, 100))],
    ids=["pack_planes", "largest_scales"],
)
def test_another_thread_runs_meanwhile(call: Callable[[], object]) -> None:
    """Python itself does not switch threads here, so only a call that gives its lock away lets the other one run."""
    begin, ran, interval = threading.Event(), [], sys.getswitchinterval()
    thread = threading.Thread(target=lambda: (begin.wait(), ran.append(True)))
    thread.start()
    sys.setswitchinterval(1000)
    try:
        begin.set()
        for _ in range(100_000):
            call()
            if ran:
                break
        found = bool(ran)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert found
