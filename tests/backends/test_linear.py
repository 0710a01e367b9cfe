"""Matrices of every stored type on the native backend, through tiny models: near dequantize + multiply, as far as 8-bit
activations are; the same bits for every number of rows, threads and instruction set. Two engines at once."""

import os
import sys
import threading
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from support import tiny_gguf
from support.harness import Driven, bits, load_program, load_weights, pool, score, using
from support.stored_rows import TYPES, dequantized, sane_rows

from kvarn import native
from kvarn.backends.cpu import Cpu
from kvarn.backends.cpu.program import CpuProgram
from kvarn.backends.reference import Reference
from kvarn.backends.reference.program import ReferenceProgram
from kvarn.cache.plan import CacheConfig
from kvarn.loading.checkpoint import open_checkpoint

HIDDEN, FF, VOCAB, HEADS, KV, DIM, LAYERS = 256, 512, 131, 4, 2, 64, 2  # whole blocks of 256; rows that are no group
ROWS = (1, 2, 3, 4, 7, 8, 16, 17, 31, 32, 33, 64, 129)
TEXT = np.random.default_rng(3).integers(0, VOCAB, 129).tolist()
EXACT = ("F32", "F16")


def write(path: Path, kind: str) -> Path:
    """A model whose matrices are of this type: random blocks, with scales that keep the numbers small."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(DIM)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tiny_gguf.byte_tokens()[:VOCAB])
    shapes = {"token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.attn_{x}": (n * DIM, HIDDEN) for x, n in (("q", HEADS), ("k", KV), ("v", KV))}
        shapes |= {f"blk.{i}.attn_output": (HIDDEN, HEADS * DIM), f"blk.{i}.ffn_down": (HIDDEN, FF)}
        shapes |= {f"blk.{i}.ffn_{x}": (FF, HIDDEN) for x in ("gate", "up")}
    for seed, (name, (rows, columns)) in enumerate(shapes.items()):
        raw = sane_rows(kind, rows, columns, seed)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    norms = [f"blk.{i}.{part}_norm" for i in range(LAYERS) for part in ("attn", "ffn")]
    for name in ("output_norm", *norms):
        scale = 1 / np.sqrt(HIDDEN) / spread(kind)  # what comes out of a matrix is about 1
        writer.add_tensor(f"{name}.weight", np.full(HIDDEN, scale, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def spread(kind: str) -> float:
    return float(np.sqrt((dequantized(sane_rows(kind, 64, HIDDEN), kind).astype(np.float64) ** 2).mean()))


def logits(program, chunk: int, backend=None, tokens=TEXT) -> np.ndarray:
    config = CacheConfig(program.config.layer_specs, 160, "paged", "f32", max_chunk=160)
    return score(program, Driven(config, backend or Cpu(pool())), tokens, 0, chunk)


def same(program: CpuProgram, rows: int, expected: np.ndarray, most: int = 129) -> bool:
    """The text in pieces of so many rows: a few pieces are enough."""
    text = TEXT[: min(max(2 * rows + 1, 9), most)]
    return bool((bits(logits(program, rows, tokens=text)) == bits(expected[: len(text)])).all())


@pytest.mark.requirement(42)
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_is_near_the_reference_and_gives_the_same_bits(kind: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "tiny.gguf", kind))
    program = load_program(checkpoint, pool())
    expected = logits(program, 512)
    assert np.isfinite(expected).all()
    for rows in ROWS:
        assert same(program, rows, expected), rows
    for threads in (1, 3):
        other = load_program(checkpoint, pool(threads))
        for rows in (1, 5, 33):
            assert same(other, rows, expected), (threads, rows)
    for name in native.isas()[1:]:
        with using(name):
            other = load_program(checkpoint, pool())
            for rows in (1, 2, 4, 8, 33):
                assert same(other, rows, expected, 9 if name == "portable" else 129), (name, rows)
    if kind == "BF16":
        for order in native.SUM_ORDERS:
            with using(native.isas()[0], order):
                mine = logits(load_program(checkpoint, pool()), 512)
            for name in native.isas():
                with using(name, order):
                    other = load_program(checkpoint, pool())
                    for rows in (1, 7, 16, 33, 129):
                        assert same(other, rows, mine, 9 if name == "portable" else 129), (name, order, rows)
    slow = ReferenceProgram(checkpoint.config, load_weights(checkpoint))
    theirs = logits(slow, 512, Reference(), TEXT[:24])
    error = np.linalg.norm(expected[:24] - theirs) / np.linalg.norm(theirs)
    assert error < (1e-4 if kind in EXACT else 0.05), error


def test_two_engines_in_one_process(tmp_path: Path) -> None:
    """Two programs with pools of their own, and two that share one, from four threads at the same time."""
    checkpoint = open_checkpoint(write(tmp_path / "tiny.gguf", "Q4_0"))
    expected = logits(load_program(checkpoint, pool(1)), 512)
    shared = native.Pool(2)
    pools = [native.Pool(2), native.Pool(3), shared, shared]
    programs: list[CpuProgram] = [load_program(checkpoint, each) for each in pools]
    wrong: list[object] = []

    def work(index: int) -> None:
        try:
            for rows in (1, 7, 33) * 3:
                found = logits(programs[index], rows, Cpu(pools[index]), TEXT[:33])
                if not (bits(found) == bits(expected[:33])).all():
                    wrong.append((index, rows))
        except BaseException as error:  # noqa: BLE001 - any failure of a thread fails the test
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a deadlock"
    assert not wrong


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 33])
def test_pools_of_any_size(threads: int, tmp_path: Path) -> None:
    """With more threads than processors, some are always late: they skip phases, and their copies of rows."""
    checkpoint = open_checkpoint(write(tmp_path / "tiny.gguf", "Q8_0"))
    expected = logits(load_program(checkpoint, pool(1)), 512, tokens=TEXT[:20])
    for _ in range(3):  # pools come and go
        mine = native.Pool(threads)
        assert mine.size == threads
        for rows in (1, 20):
            found = logits(load_program(checkpoint, mine), rows, Cpu(mine), TEXT[:20])
            assert (bits(found) == bits(expected)).all()


def test_late_threads_keep_states_right(tmp_path: Path) -> None:
    """The states of a single row are thread 0's copy, also after a step in which it came too late to multiply them."""
    checkpoint = open_checkpoint(write(tmp_path / "tiny.gguf", "Q8_0"))

    def states(threads: int) -> list[np.ndarray]:
        mine = native.Pool(threads)
        program = load_program(checkpoint, mine)
        cache = Driven(CacheConfig(program.config.layer_specs, 32, "paged", "f32"), Cpu(mine))
        cache.open(0)
        found = []
        for position, token in enumerate(TEXT[:20]):
            cache.reserve(0, position + 1)
            found.append(bits(program.hidden(cache.memory, cache.book.prepare([0]), [token], [0])).copy())
            cache.commit(0, [token])
        return found

    expected = states(1)
    for threads in (2, 8):
        assert all((a == b).all() for a, b in zip(states(threads), expected, strict=True))


def asleep(task: int) -> bool:
    return Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.mark.skipif(sys.platform != "linux", reason="threads stay where the system puts them")
def test_threads_may_run_where_they_might_before(tmp_path: Path) -> None:
    """A thread that leaves another's processor to it is bound to nothing afterwards."""
    checkpoint = open_checkpoint(write(tmp_path / "tiny.gguf", "Q8_0"))
    expected = logits(load_program(checkpoint, pool(1)), 512, tokens=TEXT[:40])
    before = set(os.listdir("/proc/self/task"))
    mine = native.Pool(2)
    tasks = [threading.get_native_id(), *(int(task) for task in set(os.listdir("/proc/self/task")) - before)]
    program, allowed = load_program(checkpoint, mine), os.sched_getaffinity(0)
    try:
        for processor in sorted(allowed) * 10:
            for may in ({processor}, allowed):  # all on one; then free to go, but nobody has gone yet
                for task in tasks:
                    os.sched_setaffinity(task, may)
                found = logits(program, 1, Cpu(mine), TEXT[:40])
                assert (bits(found) == bits(expected)).all()
                while not all(map(asleep, tasks[1:])):  # until then one may still be on its way out of the last barrier
                    time.sleep(0.001)
                assert [os.sched_getaffinity(task) for task in tasks] == [may] * len(tasks)
    finally:
        os.sched_setaffinity(0, allowed)


def test_trials_change_no_bit(tmp_path: Path) -> None:
    """Of the number of threads, and of prefetches."""
    checkpoint = open_checkpoint(write(tmp_path / "tiny.gguf", "Q4_0"))
    tokens = (TEXT * 2)[:150]
    expected = logits(load_program(checkpoint, pool(1)), 512, tokens=tokens)
    for threads in (2, 8):
        mine = native.Pool(threads)
        assert (bits(logits(load_program(checkpoint, mine), 1, Cpu(mine), tokens)) == bits(expected)).all()


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_trials_of_a_batch_change_no_bit(codec: str, tmp_path: Path) -> None:
    """Of products that prefetch cells: from nine sequences on. The first trial is over after 67 steps: contexts of
    other powers of two begin anew."""
    checkpoint = open_checkpoint(write(tmp_path / "tiny.gguf", "Q4_0"))
    program, steps, batch = load_program(checkpoint, pool(2)), 100, 12
    config = CacheConfig(program.config.layer_specs, 160, "paged", codec, max_seqs=batch, max_chunk=160)
    alone = Driven(config, Cpu(pool(1)))
    expected = score(load_program(checkpoint, pool(1)), alone, TEXT[:steps], 0, 1)
    cache = Driven(config, Cpu(pool(2)))
    for seq in range(batch):
        cache.open(seq)
    for at in range(steps):
        for seq in range(batch):
            assert cache.reserve(seq, at + 1)
        step = cache.book.prepare(list(range(batch)))
        rows = program.run(cache.memory, step, [TEXT[at]] * batch, list(range(batch))).rows()
        assert (bits(rows) == bits(expected[at])).all(), at
        for seq in range(batch):
            cache.commit(seq, [TEXT[at]])
