"""Codecs: the native encoders of every instruction set against the NumPy definitions, as integers."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from kvarn import native
from kvarn.backends.cpu import Cpu
from kvarn.backends.reference.codecs import DEFINITIONS, PACKED, Encoded, rotate, scale_of
from kvarn.cache.codec import CODECS, Codec
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.errors import KvarnError

DIM = 64


@pytest.fixture(params=native.isas())
def instruction_set(request):
    before = native.isa()
    native.select_isa(request.param)
    assert native.isa() == request.param
    yield request.param
    native.select_isa(before)


def from_bits(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32).reshape(-1, DIM)


def samples() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    edges = np.array([0, 1, 0x7FFFFF, 0x800000, 0x33000000, 0x33000001, 0x387FFFFF, 0x38800000], np.uint32)
    near = (np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] + np.array([0, 0x7FFF, 0x8000, 0x8001], np.uint32)
    halves = np.arange(0x38000000, 0x38000000 + (1 << 20), 1 << 8, dtype=np.uint32)  # around the smallest normal f16
    tops = np.arange(0x477FE000, 0x47800800, 2, dtype=np.uint32)[: 4096 // DIM * DIM]  # where f16 overflows
    return {
        "normal": rng.standard_normal((500, DIM)).astype(np.float32),
        "wide": (rng.standard_normal((500, DIM)) * 10.0 ** rng.integers(-30, 30, (500, 1))).astype(np.float32),
        "any bits": from_bits(rng.integers(0, 1 << 32, 500 * DIM, dtype=np.uint64)),
        "every upper half": from_bits(near.ravel()),
        "around f16's smallest": from_bits(halves),
        "around f16's largest": from_bits(tops),
        "edges": from_bits(np.tile(np.concatenate((edges, edges | 0x80000000)), DIM // 4)),
        "zeros": np.zeros((3, DIM), np.float32),
        "halves of a step": np.tile(np.r_[127, np.arange(-31, 32) + 0.5], (4, 1)).astype(np.float32),
    }


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.filterwarnings("ignore:invalid value|overflow|divide by zero:RuntimeWarning")
def test_native_encoders_equal_their_definition(name: str, instruction_set: str) -> None:
    codec = DEFINITIONS[name]
    for what, x in samples().items():
        expected, ours = codec.define(x), codec.encode(x)
        assert ours.cells.dtype == expected.cells.dtype == np.dtype(CODECS[name].unit)
        a, b = (cells.view(f"u{np.dtype(CODECS[name].unit).itemsize}") for cells in (ours.cells, expected.cells))
        both_nan = a != a if name != "f16" else np.isnan(ours.cells) & np.isnan(expected.cells)
        assert ((a == b) | (both_nan & (name == "f16"))).all(), what  # NumPy quiets f16 NaNs as it likes
        if CODECS[name].scale_unit:
            assert ours.scales.dtype == expected.scales.dtype == np.dtype(CODECS[name].scale_unit)
            unsigned = f"u{expected.scales.itemsize}"
            same = ours.scales.view(unsigned) == expected.scales.view(unsigned)
            assert (same | (np.isnan(ours.scales) & np.isnan(expected.scales))).all(), what


@pytest.mark.parametrize("name", CODECS)
def test_widening_is_exact(name: str) -> None:
    codec = DEFINITIONS[name]
    every = (
        np.arange(1 << 16, dtype=np.uint16).view(np.dtype(CODECS[name].unit))
        if np.dtype(CODECS[name].unit).itemsize == 2
        else None
    )
    if every is not None:
        wide = codec.decode(Encoded(every.reshape(-1, DIM), None), DIM)
        again = codec.define(wide).cells.ravel()
        finite = np.isfinite(wide.ravel())
        assert (again.view(np.uint16)[finite] == every.view(np.uint16)[finite]).all()


def codes_of(x: np.ndarray) -> tuple[list, list]:
    cells, scales = DEFINITIONS["int8"].encode(np.ascontiguousarray(x, np.float32))
    return cells.view(np.int8).tolist(), scales.tolist()


def test_rotation_is_the_hadamard_matrix_in_blocks_of_32() -> None:
    h = np.ones((1, 1))
    while len(h) < 32:
        h = np.block([[h, h], [h, -h]])
    x = np.random.default_rng(2).integers(-9, 9, (5, 96)).astype(np.float32)  # whole numbers: no rounding
    assert (rotate(x) == (x.reshape(5, 3, 32) @ h).reshape(5, 96)).all()
    assert (rotate(rotate(x)) == 32 * x).all()


def test_int8_scale_rounding_and_zero_vectors() -> None:
    """Rows whose rotation is known: R(R(y)) = 32 y."""
    y = np.zeros((3, 32), np.float32)
    y[0, :6] = [127, 0.5, 1.5, -0.5, -1.5, 126.5]
    y[2, :6] = [-254, 1, 2, 3, 5, 7]
    codes, scales = codes_of(rotate(y) / 32)
    assert scales == [1.0, 0.0, 2.0]
    assert codes == [[127, 0, 2, 0, -2, 126, *[0] * 26], [0] * 32, [-127, 0, 1, 2, 2, 4, *[0] * 26]]  # halves to even


def test_int8_does_not_hide_what_is_not_finite() -> None:
    x = np.zeros((3, 40), np.float32)
    x[:2, 35] = np.nan, np.inf
    x[2] = 1
    codes, scales = codes_of(x)
    assert np.isnan(scales).tolist() == [True, True, False]
    assert not np.any(codes[:2])
    decoded = DEFINITIONS["int8"].decode(DEFINITIONS["int8"].encode(x), 40)
    assert np.isnan(decoded[:2]).all()
    assert np.isfinite(decoded[2]).all()


@pytest.mark.parametrize("dim", [32, 48, 64, 80, 128, 256])
def test_int8_error_is_small_and_rotation_protects_from_large_channels(dim: int) -> None:
    rng = np.random.default_rng(dim)
    plain = rng.standard_normal((2000, dim)).astype(np.float32)
    spiked = np.where(rng.random(dim) < 0.03, 20, 1).astype(np.float32) * plain
    codec = DEFINITIONS["int8"]

    def error(x: np.ndarray) -> float:
        return float(np.sqrt(np.square(codec.decode(codec.encode(x), dim) - x).sum() / np.square(x).sum()))

    assert error(plain) < 0.0075
    assert error(spiked) < 0.0085


def int8_rows() -> dict[str, Encoded]:
    """Rows of int8 that no encoding of numbers needs to give."""
    rng = np.random.default_rng(9)
    codes = rng.integers(-127, 128, (3000, DIM)).astype(np.int8)
    few = np.where(rng.random((3000, DIM)) < 0.9, 0, codes).astype(np.int8)
    every = np.exp2(rng.uniform(-30, 20, 3000)).astype(np.float32)  # scales below the least code and above the largest
    edges = scale_of(np.arange(1, 255, dtype=np.uint8))  # where the code of the scale changes
    edges = (edges[:, None] * np.array([7.5, 31.5], np.float32) / np.float32(127)).ravel()
    near = np.concatenate((edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf))))
    full = np.full((len(near), DIM), 127, np.int8) * rng.choice([-1, 1], (len(near), DIM)).astype(np.int8)
    special = np.array([0, np.nan, np.inf, 3e38, 1e-38], np.float32)
    return {
        "any": Encoded(codes.view("<u4"), every),
        "zeros between": Encoded(few.view("<u4"), every),
        "edges of scales": Encoded(full.view("<u4"), near),
        "special scales": Encoded(codes[:5].view("<u4"), special),
        "no codes": Encoded(np.zeros((5, DIM // 4), "<u4"), special),
    }


@pytest.mark.parametrize("name", PACKED)
def test_native_encoders_make_the_same_cells_of_int8_rows(name: str, instruction_set: str) -> None:
    encode = {"int4": native.encode_int4, "int6": native.encode_int6}[name]
    for what, rows in int8_rows().items():
        expected = PACKED[name].pack(rows)
        cells, scales = np.zeros_like(expected.cells), np.zeros_like(expected.scales)
        encode(rows.cells.view(np.int8), rows.scales, cells, scales)
        assert (scales == expected.scales).all(), what
        assert (cells == expected.cells).all(), what


def test_every_scale_code_is_a_number_and_the_least_that_reaches() -> None:
    codes = np.arange(256, dtype=np.uint8)
    scales = scale_of(codes)
    assert scales[0] == 0
    assert np.isnan(scales[255])
    assert scales[1] == 9 / 8 * 2.0**-17
    assert scales[254] == 14 / 8 * 2.0**14
    assert (np.diff(scales[:255]) > 0).all()
    assert (scales[9:255] == 2 * scales[1:247]).all(), "eight steps are a factor of two"


@pytest.mark.parametrize("name", PACKED)
def test_packed_numbers_are_where_the_contract_says(name: str) -> None:
    """A row of int8 codes whose blocks hold levels, with a scale that gives the levels themselves."""
    top = (1 << PACKED[name].bits) - 1
    levels = np.arange(-top, top + 1, 2)  # all of them
    wanted = np.random.default_rng(3).permutation(np.resize(levels, 64))
    wanted[[0, 32]] = top  # the scale of each block is that of its largest level
    codes = np.pad(wanted, (0, 32)).astype(np.int8)
    cells, scales = PACKED[name].pack(Encoded(codes.view("<u4")[None], np.array([0.5], np.float32)))
    assert scales.tolist() == [[8 * 17, 8 * 17, 0]], "1, 1 and 0"
    data = cells.view(np.uint8).reshape(3, -1)
    u = np.concatenate([(wanted + top) // 2, np.full(32, (top + 1) // 2)]).reshape(3, 32)
    for block, i in itertools.product(range(3), range(16)):
        assert data[block, i] == u[block, i] & 15 | (u[block, 16 + i] & 15) << 4
    for block, i in itertools.product(range(3), range(8 if name == "int6" else 0)):
        assert data[block, 16 + i] == sum(int(u[block, 8 * k + i] >> 4) << 2 * k for k in range(4))


@pytest.mark.parametrize("name", PACKED)
def test_packed_numbers_do_not_hide_what_is_not_finite(name: str) -> None:
    """The whole row, as with int8: cells are made from its rows."""
    x = np.zeros((4, 64), np.float32)
    x[:2, 35] = np.nan, np.inf
    x[2] = 1
    cells, scales = DEFINITIONS[name].encode(x)
    assert (scales[:2] == 255).all()
    assert (scales[3] == 0).all()
    assert (cells[:2] == cells[3]).all(), "codes in the middle"
    decoded = DEFINITIONS[name].decode(Encoded(cells, scales), 64)
    assert np.isnan(decoded[:2]).all()
    assert np.isfinite(decoded[2]).all()
    assert not decoded[3].any()


@pytest.mark.parametrize(("name", "bound"), [("int6", 0.025), ("int4", 0.09)])
@pytest.mark.parametrize("dim", [32, 48, 64, 128, 256])
def test_the_error_of_packed_numbers_is_small(dim: int, name: str, bound: float) -> None:
    """Also with one large number in each block, which rotation spreads."""
    codec, plain = DEFINITIONS[name], np.random.default_rng(dim).standard_normal((2000, dim)).astype(np.float32)
    spiked = np.where(np.arange(dim) % 32 == 5, 20, 1).astype(np.float32) * plain
    for rows in (plain, spiked):
        moved = codec.decode(codec.encode(rows), dim) - rows
        assert np.sqrt(np.square(moved).sum() / np.square(rows).sum()) < bound


def test_products_of_int4_are_exact_in_bf16() -> None:
    half = scale_of(np.arange(1, 255, dtype=np.uint8))[:, None] * np.float32(0.5)
    products = half * np.arange(-15, 16, 2, dtype=np.float32)
    assert not (products.view(np.uint32) & 0xFFFF).any()


def test_bf16_error_is_half_a_unit() -> None:
    x = np.random.default_rng(1).standard_normal((100, DIM)).astype(np.float32)
    back = DEFINITIONS["bf16"].decode(DEFINITIONS["bf16"].encode(x), DIM)
    assert (np.abs(back - x) <= np.abs(x) * 2.0**-8).all()


def test_the_best_instruction_set_is_the_default_and_the_environment_forces_another() -> None:
    code = "from kvarn import native; print(native.isa())"
    for wanted, expected in ((None, native.isas()[0]), ("portable", "portable")):
        environment = {k: v for k, v in os.environ.items() if k != "KVARN_ISA"}
        if wanted:
            environment["KVARN_ISA"] = wanted
        printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
        assert printed.strip() == expected


def test_an_instruction_set_that_does_not_run_here_is_refused_by_name() -> None:
    before = native.isa()
    with pytest.raises(KvarnError, match=r"'sse9' does not run here; available: .*portable"):
        native.select_isa("sse9")
    assert native.isa() == before


def test_instruction_sets_match_the_processor() -> None:
    features = set(native.cpu_features())
    assert ("avx2" in native.isas()) == ({"avx2", "fma"} <= features)
    assert "avxvnni" not in native.isas() or {"avx2", "fma", "avxvnni"} <= features
    assert ("avx512" in native.isas()) == ({"avx2", "avx512f", "avx512bw", "avx512vl", "avx512dq"} <= features)
    assert native.isas()[-1] == "portable"


def test_the_cpu_backend_refuses_a_codec_that_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, "odd", Codec("odd", "f4"))
    planned = plan(CacheConfig([LayerSpec(2, 1, 8, 8)], 64, "paged", "odd"))
    with pytest.raises(KvarnError, match="the cpu backend has no odd cells: use --backend reference"):
        Cpu().memory(planned)


@pytest.mark.parametrize(
    ("x", "out"),
    [
        (np.zeros((2, 3), np.float64), np.zeros((2, 3), np.uint16)),
        (np.zeros((2, 3), np.float32), np.zeros((3, 2), np.uint16)),
        (np.zeros((2, 6), np.float32)[:, ::2], np.zeros((2, 3), np.uint16)),
        (np.zeros(3, np.float32), np.zeros(3, np.uint16)),
        (np.zeros((2, 3), np.float32), np.zeros((2, 3), np.int16)),
    ],
)
def test_the_native_boundary_refuses_wrong_arrays(x: np.ndarray, out: np.ndarray) -> None:
    with pytest.raises((TypeError, ValueError)):
        native.encode_bf16(x, out)
