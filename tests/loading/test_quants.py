"""Stored weights to float32: the gguf package's bits for every type, and three formats by their definitions."""

import tracemalloc

import gguf
import numpy as np
import pytest
from support.stored_rows import random_rows

from kvarn.errors import BadModel
from kvarn.loading import quants
from kvarn.loading.encodings import BY_ID
from kvarn.loading.quants import READABLE, dequantize

BLOCK_TYPES = sorted(READABLE - {"F32", "F16", "BF16"})
QUANTIZABLE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "TQ1_0", "TQ2_0"]


def bits(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a).view(np.uint32)


def test_sizes_are_the_packages():
    for number, encoding in BY_ID.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (encoding.name, encoding.block_size, encoding.block_bytes)


@pytest.mark.parametrize("rows", [1, 3, 17, 40])
@pytest.mark.parametrize("name", sorted(READABLE))
def test_random_bytes_give_the_packages_bits(name, rows, monkeypatch):
    columns = 512
    monkeypatch.setattr(quants, "CHUNK", 8 * columns)  # so that the rows take several chunks
    raw = random_rows(name, rows, columns, seed=rows)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    found = dequantize(raw.ravel(), name, (rows, columns))
    assert found.dtype == np.float32
    assert found.shape == (rows, columns)
    assert found.flags.writeable
    assert np.array_equal(bits(found), bits(expected))


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_quantized_weights_come_back_near(name):
    weights = np.random.default_rng(1).standard_normal((5, 256)).astype(np.float32)
    raw = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name]).view(np.uint8)
    found = dequantize(raw, name, weights.shape)
    tolerance = 1.5 if name.startswith("TQ") else 0.3
    assert np.abs(found - weights).max() < tolerance * np.abs(weights).max()
    assert np.array_equal(bits(found), bits(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])))


def test_q8_0_by_its_definition():
    raw = random_rows("Q8_0", 3, 64)
    raw[:, [1, 35]] &= 0x3F  # finite scales
    expected = []
    for block in raw.reshape(-1, 34):
        scale = block[:2].view(np.float16)[0].astype(np.float32)
        expected += [np.float32(q) * scale for q in block[2:].view(np.int8)]
    assert np.array_equal(bits(dequantize(raw, "Q8_0", (3, 64)).ravel()), bits(np.array(expected, np.float32)))


def test_q4_1_by_its_definition():
    raw = random_rows("Q4_1", 2, 64)
    raw.reshape(-1, 20)[:, [1, 3]] &= 0x3F
    expected = []
    for block in raw.reshape(-1, 20):
        scale, least = block[:4].view(np.float16).astype(np.float32)
        nibbles = [q & 15 for q in block[4:]] + [q >> 4 for q in block[4:]]  # the low halves come first
        expected += [scale * np.float32(q) + least for q in nibbles]
    assert np.array_equal(bits(dequantize(raw, "Q4_1", (2, 64)).ravel()), bits(np.array(expected, np.float32)))


def test_q4_k_by_its_definition():
    """256 numbers: f16 scale, f16 minimum, 12 bytes with eight 6-bit scales and minima, 128 bytes of nibbles."""
    raw = random_rows("Q4_K", 2, 512)
    raw.reshape(-1, 144)[:, [1, 3]] &= 0x3F
    expected = []
    for block in raw.reshape(-1, 144):
        d, dmin = block[:4].view(np.float16).astype(np.float32)
        packed, nibbles = block[4:16].astype(int), block[16:].reshape(4, 32)
        for group in range(8):
            if group < 4:
                scale, least = packed[group] & 63, packed[group + 4] & 63
            else:
                scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
                least = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
            for byte in nibbles[group // 2]:
                q = byte >> 4 if group % 2 else byte & 15
                expected.append(d * np.float32(scale) * np.float32(q) - dmin * np.float32(least))
    assert np.array_equal(bits(dequantize(raw, "Q4_K", (2, 512)).ravel()), bits(np.array(expected, np.float32)))


def test_bf16_keeps_every_bit():
    every = np.arange(1 << 16, dtype=np.uint16)
    assert np.array_equal(bits(dequantize(every.view(np.uint8), "BF16", (1 << 16,))), every.astype(np.uint32) << 16)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (0, 64)])
def test_shapes(shape):
    n = int(np.prod(shape))
    assert dequantize(np.zeros(n // 32 * 34, np.uint8), "Q8_0", shape).shape == shape


def test_refusals():
    with pytest.raises(BadModel, match="type Q8_K cannot be read"):
        dequantize(np.zeros(292, np.uint8), "Q8_K", (256,))
    with pytest.raises(BadModel, match="type F8_E4M3 cannot be read"):
        dequantize(np.zeros(2, np.uint8), "F8_E4M3", (2,))
    with pytest.raises(BadModel, match="no whole blocks of 32"):
        dequantize(np.zeros(34, np.uint8), "Q8_0", (1, 33))
    with pytest.raises(BadModel, match=r"34 bytes are no Q8_0 tensor of shape \(2, 32\), which takes 68"):
        dequantize(np.zeros(34, np.uint8), "Q8_0", (2, 32))


def test_widening_takes_little_more_memory_than_its_result():
    raw = np.zeros((4096, 2048 // 256 * 144), np.uint8)
    dequantize(raw[:1], "Q4_K", (1, 2048))  # import
    tracemalloc.start()
    out = dequantize(raw, "Q4_K", (4096, 2048))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - out.nbytes < 16e6
