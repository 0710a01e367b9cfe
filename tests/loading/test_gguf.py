"""The GGUF reader: every kind of value, and every way a file can be wrong."""

import os
import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from support.gguf_writer import KINDS, Tensor, entry, gguf
from support.hostile_gguf import HOSTILE
from support.models import SMOLLM2, model

from kvarn.errors import BadModel
from kvarn.loading.gguf import GGUFFile

F32 = np.arange(12, dtype=np.float32).reshape(3, 4)


def read(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    return GGUFFile.open(path)


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type(tmp_path, version):
    limits = {"u8": 255, "i8": -128, "u16": 65535, "i16": -(2**15), "u32": 2**32 - 1, "i32": -(2**31)}
    limits |= {"f32": 1.5, "bool": 1, "u64": 2**64 - 1, "i64": -(2**63), "f64": 1e300}
    keys = [(f"one.{kind}", kind, content) for kind, content in limits.items()]
    keys += [(f"many.{kind}", f"[{kind}", [0, content]) for kind, content in limits.items()]
    keys += [("text", "str", "grüße 🦙\n"), ("texts", "[str", ["", "a", "ß"]), ("nested", "[[u8", [[1], [], [2, 3]])]
    keys += [("none", "[u32", []), ("no text", "[str", []), ("empty", "str", "")]
    found = read(tmp_path, gguf(keys, [Tensor.of("t", F32)], version=version)).metadata
    for kind, content in limits.items():
        assert found[f"one.{kind}"] == content
        assert type(found[f"one.{kind}"]) is (bool if kind == "bool" else float if kind[0] == "f" else int)
        many = found[f"many.{kind}"]
        assert isinstance(many, np.ndarray)
        assert many.tolist() == [0, content]
        assert many.dtype.isnative
    assert found["text"] == "grüße 🦙\n"
    assert found["texts"] == ["", "a", "ß"]
    assert [x.tolist() for x in found["nested"]] == [[1], [], [2, 3]]
    assert (len(found["none"]), found["no text"], found["empty"]) == (0, [], "")


def test_tensors_are_views_in_numpy_order(tmp_path):
    q8 = Tensor("q", bytes(range(68)), (64, 1), type_id=8)
    file = read(tmp_path, gguf([], [q8, Tensor.of("a", F32), Tensor.of("v", F32[0])]))
    assert {t.name: (t.type, t.shape, t.nbytes) for t in file.tensors.values()} == {
        "q": ("Q8_0", (1, 64), 68),
        "a": ("F32", (3, 4), 48),
        "v": ("F32", (4,), 16),
    }
    raw = file.raw("a")
    assert raw.dtype == np.uint8
    assert not raw.flags.writeable
    assert np.array_equal(raw.view(np.float32).reshape(3, 4), F32)
    assert file.raw("q").tobytes() == bytes(range(68))
    with pytest.raises(BadModel, match="has no tensor nope"):
        file.raw("nope")


def test_alignment_of_its_own(tmp_path):
    tensors = [Tensor.of("a", F32[0]), Tensor.of("b", F32)]
    file = read(tmp_path, gguf([("general.alignment", "u32", 128)], tensors, alignment=128))
    assert np.array_equal(file.raw("b").view(np.float32).reshape(3, 4), F32)


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_in_one_line(tmp_path, case):
    content, expected = HOSTILE[case]
    with pytest.raises(BadModel) as caught:
        read(tmp_path, content)
    message = str(caught.value)
    assert expected in message
    assert "m.gguf" in message
    assert len(message) < 700
    assert message.isprintable()
    assert ";" in message, "the line says what to do"


def test_cut_anywhere_is_refused(tmp_path):
    whole = gguf([("a", "u32", 1), ("b", "[str", ["x", "yz"]), ("c", "[[u16", [[1, 2]])], [Tensor.of("t", F32)])
    for length in range(len(whole)):
        with pytest.raises(BadModel):
            read(tmp_path, whole[:length])
    assert read(tmp_path, whole).tensors


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(BadModel, match=r"nope\.gguf cannot be read: No such file"):
        GGUFFile.open(tmp_path / "nope.gguf")
    with pytest.raises(BadModel, match="cannot be read"):
        GGUFFile.open(tmp_path)


def small_model() -> bytes:
    keys = [("general.architecture", "str", "llama"), ("general.alignment", "u32", 32), ("llama.block_count", "u32", 2)]
    keys += [(f"k.{kind}", kind, 1) for kind in KINDS] + [(f"a.{kind}", f"[{kind}", [0, 1, 1]) for kind in KINDS]
    keys += [("tokens", "[str", [f"token{i}" for i in range(40)]), ("nested", "[[str", [["a"], ["b", "c"]])]
    return gguf(keys, [Tensor.of(f"blk.{i}.weight", F32) for i in range(8)])


def open_bounded(path: Path, size: int) -> bool:
    """Whether it opens; in memory that its size justifies. (A hang would be seen: the suite would not end.)"""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        GGUFFile.open(path)
        opened = True
    except BadModel:
        opened = False
    assert tracemalloc.get_traced_memory()[1] - before < 100_000 + 30 * size
    return opened


def mutations(random_: random.Random, n_bytes: int) -> list[tuple[int, bytes]]:
    """Some bytes at some places, with a liking for lengths and counts at their limits."""
    found = []
    for _ in range(random_.choice((1, 1, 1, 2, 5))):
        edge = struct.pack("<Q", random_.choice((0, 1, 255, 2**31, 2**32 - 1, 2**61, 2**63, 2**64 - 1)))
        some = random_.choice((random_.randbytes(1), edge[: random_.choice((1, 4, 8))], random_.randbytes(4)))
        found.append((random_.randrange(n_bytes - 8), some))
    return found


def fuzz(path: Path, header: int, rounds: int, seed: int) -> int:
    random_, opened = random.Random(seed), 0
    tracemalloc.start()
    try:
        with path.open("r+b", buffering=0) as file:
            original = file.read(header)
            for _ in range(rounds):
                for at, some in mutations(random_, header):
                    os.pwrite(file.fileno(), some, at)
                opened += open_bounded(path, header)
                os.pwrite(file.fileno(), original, 0)
    finally:
        tracemalloc.stop()
    return opened


def test_three_thousand_mutations_open_or_are_refused(tmp_path):
    content = small_model()
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    opened = fuzz(path, len(content) - 8 * 64, 3_000, seed=1)
    assert 150 < opened < 2_850, "the mutations should neither all break the file nor all leave it whole"


def test_mutations_of_a_real_header(tmp_path):
    real = model(SMOLLM2)
    header = min(info.offset for info in GGUFFile.open(real).tensors.values())
    path = tmp_path / "m.gguf"
    with real.open("rb") as whole, path.open("wb") as copy:
        copy.write(whole.read(header))
        copy.truncate(real.stat().st_size)  # the tensors are a hole: nothing reads them
    fuzz(path, header, 4, seed=2)


def test_a_real_header_and_vocabulary():
    file = GGUFFile.open(model(SMOLLM2))  # bench/loading.py times it
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152


def test_agrees_with_the_gguf_package(tmp_path):
    gguf_package = pytest.importorskip("gguf")
    path = tmp_path / "theirs.gguf"
    writer = gguf_package.GGUFWriter(path, "llama")
    writer.add_string("a", "text")
    writer.add_array("b", ["x", "y"])
    writer.add_array("c", [1, 2, 3])
    writer.add_float32("d", 0.5)
    writer.add_tensor("t", F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(path)
    assert file.metadata["a"] == "text"
    assert file.metadata["b"] == ["x", "y"]
    assert list(file.metadata["c"]) == [1, 2, 3]
    assert np.array_equal(file.raw("t").view(np.float32).reshape(3, 4), F32)
    assert entry(Tensor.of("t", F32), 0) in path.read_bytes(), "our writer writes what theirs does"
