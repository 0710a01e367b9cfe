"""A fingerprint changes with everything that decides the bits of cells, and with nothing else."""

import os
from pathlib import Path

import pytest
from support import tiny_gguf

from kvarn import LLM, arithmetic, native
from kvarn.errors import BadModel
from kvarn.lasting import weights as weights_module
from kvarn.lasting.weights import Weights
from kvarn.loading.checkpoint import open_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf.write(tmp_path / "m.gguf", "llama", tiny_gguf.CHAT)


def of(path: Path, **settings):
    with LLM(path, **{"backend": "cpu", "threads": 1, "context": 64} | settings) as llm:
        return llm.fingerprint


def test_what_decides_bits_is_in_it_and_nothing_else(model: Path, tmp_path: Path, monkeypatch) -> None:
    plain = of(model)
    for settings in (
        dict(cache="contiguous"),
        dict(cache="head-major"),
        dict(cache_layout="token-major", cache="paged", block_size=16),
        dict(context=128, max_seqs=2, threads=2),
    ):
        assert of(model, **settings) == plain, settings
    other_template = tiny_gguf.write(tmp_path / "t.gguf", "llama", tiny_gguf.CHAT.replace("assistant", "Assistant"))
    assert of(other_template) == plain
    order = next(name for name in native.SUM_ORDERS if name != plain.order)
    changed = {
        "codec": of(model, cache_type="int8"),
        "backend": of(model, backend="reference"),
        "window": of(model, cache="sliding", window=16),
        "pinned": of(model, cache="sinks", window=16, pinned=2),
        "rope": of(tiny_gguf.write(tmp_path / "y.gguf", "llama-yarn", tiny_gguf.CHAT)),
    }
    monkeypatch.setattr(arithmetic, "VERSION", arithmetic.VERSION + 1)
    changed["arithmetic"] = of(model)
    monkeypatch.undo()
    native.select_sum_order(order)
    try:
        changed["order"] = of(model)
    finally:
        native.select_sum_order(plain.order)
    assert len({each.digest for each in [plain, *changed.values()]}) == len(changed) + 1
    for name, each in changed.items():
        reason = each.difference(plain)
        assert reason.startswith("made with"), name
        assert "\n" not in reason
    assert plain.difference(of(model)) == ""


def test_one_changed_byte_of_the_weights_is_another_model(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    before = Weights(checkpoint).digest()
    place = checkpoint.place("blk.1.attn_v.weight")
    with model.open("r+b") as file:
        file.seek(place.info.offset + 5)
        byte = file.read(1)
        file.seek(place.info.offset + 5)
        file.write(bytes([byte[0] ^ 1]))
    assert Weights(open_checkpoint(model)).digest() != before


def test_a_model_that_changed_since_it_was_opened_has_no_digest(model: Path) -> None:
    weights = Weights(open_checkpoint(model))
    os.utime(model, ns=(1, 1))
    with pytest.raises(BadModel, match="has changed since it was loaded"):
        weights.digest()


def test_the_digest_is_taken_once_and_the_stamp_holds_for_one_file(model: Path, stamps: Path, monkeypatch) -> None:
    monkeypatch.setattr(weights_module, "_SETTLED", 0)
    reads = []

    def count(what: str, done: int, total: int) -> None:
        reads.append(done)

    first = Weights(open_checkpoint(model)).digest(count)
    assert reads
    reads.clear()
    assert Weights(open_checkpoint(model)).digest(count) == first
    assert not reads
    copy = model.with_name("n.gguf")
    copy.write_bytes(model.read_bytes())
    os.replace(copy, model)  # the same bytes and size in another inode
    assert Weights(open_checkpoint(model)).digest(count) == first
    assert reads
    for stamp in (stamps / "weights").iterdir():
        stamp.write_text('{"digest": "0", "files": 3}')  # damaged: taken again
    assert Weights(open_checkpoint(model)).digest() == first


def test_a_file_that_was_just_written_gets_no_stamp(model: Path, stamps: Path, monkeypatch) -> None:
    monkeypatch.setattr(weights_module, "_SETTLED", 10**18)
    Weights(open_checkpoint(model)).digest()
    assert not (stamps / "weights").exists()


def test_stamps_of_models_that_are_gone_do_not_pile_up(model: Path, stamps: Path, monkeypatch) -> None:
    monkeypatch.setattr(weights_module, "_SETTLED", 0)
    monkeypatch.setattr(weights_module, "_MOST_STAMPS", 2)
    for name in "abc":
        copy = model.with_name(f"{name}.gguf")
        copy.write_bytes(model.read_bytes())
    taken = []
    for at, name in enumerate("abacab"):  # a is used again before c pushes one out
        for stamp in (stamps / "weights").iterdir() if at else ():
            os.utime(stamp, ns=(stamp.stat().st_mtime_ns - 10**9,) * 2)
        Weights(open_checkpoint(model.with_name(f"{name}.gguf"))).digest(
            lambda what, done, total, name=name: taken.append(name) if done == total else None
        )
    assert taken == ["a", "b", "c", "b"]
    assert len(list((stamps / "weights").iterdir())) == 2
