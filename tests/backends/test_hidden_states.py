"""Hidden states of the native backend: what the logits of a step were made of, for as many rows as it asked for."""

from pathlib import Path

import numpy as np
import pytest
from support import tiny_gguf
from support.harness import Driven, bits, load_program, load_weights, pool
from support.native_program import emitted
from support.tiny_models import ARCHITECTURES, GOLDEN

from kvarn import native
from kvarn.backends.base import Memory
from kvarn.backends.cpu import Cpu
from kvarn.backends.cpu.program import CpuProgram
from kvarn.backends.reference import Reference
from kvarn.backends.reference.program import ReferenceProgram
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import align
from kvarn.cache.step import Step
from kvarn.loading.checkpoint import open_checkpoint

TOKENS = [5, 77, 3, 200, 9, 41, 41]
ROWS = ([6], [0], [2, 6], [1, 3, 6], list(range(7)))  # a single row takes a way of its own (native/program.cpp)


def hidden(program: CpuProgram | ReferenceProgram, backend: Reference | Cpu, rows: list[int]) -> np.ndarray:
    """Of these rows of a text in one step."""
    return program.hidden(*begin(program, backend), TOKENS, rows).copy()


def begin(program: CpuProgram | ReferenceProgram, backend: Reference | Cpu) -> tuple[Memory, Step]:
    cache = Driven(CacheConfig(program.config.layer_specs, 32, "paged", "f32"), backend)
    cache.open(0)
    assert cache.reserve(0, len(TOKENS))
    return cache.memory, cache.book.prepare([0])


@pytest.mark.parametrize("variant", ARCHITECTURES)
def test_hidden_states_equal_those_of_the_reference(variant: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_gguf.write(tmp_path / "tiny.gguf", variant))
    slow = ReferenceProgram(checkpoint.config, load_weights(checkpoint))
    expected = hidden(slow, Reference(), list(range(len(TOKENS))))
    embedding = checkpoint.tensor("token_embd.weight" if variant in tiny_gguf.TIED else "output.weight")
    for threads in (1, 3):
        program, place = load_program(checkpoint, pool(threads)), Cpu(pool(threads))
        for rows in ROWS:
            found = hidden(program, place, rows)
            assert np.abs(found - expected[rows]).max() < 1e-4 * np.abs(expected).max(), (threads, rows)
            assert (bits(hidden(program, place, rows)) == bits(found)).all()
            logits = program.run(*begin(program, place), TOKENS, rows).rows()
            assert np.abs(found @ embedding.T - logits).max() < 1e-4 * np.abs(logits).max(), "what logits are made of"


def test_hidden_states_that_are_not_there_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_gguf.write(tmp_path / "tiny.gguf", "llama"))
    program = emitted(checkpoint, pool())
    with pytest.raises(ValueError, match=r"the last step's are \[0, 0\], out is .*1, 128"):
        program.hidden(np.empty((1, GOLDEN.hidden), np.float32))
    cache = Driven(CacheConfig(checkpoint.config.layer_specs, 32, "paged", "f32"), Cpu(pool()))
    cache.open(0)
    cache.reserve(0, len(TOKENS))
    cache.prepare([0])
    logits = np.empty((2, align(program.vocabulary, native.GROUP_ROWS)), np.float32)
    program.run(cache.memory.view, np.array(TOKENS), cache.host.positions, np.array([1, 2]), logits)
    with pytest.raises(ValueError, match=rf"the last step's are \[2, {GOLDEN.hidden}\]"):
        program.hidden(np.empty((3, GOLDEN.hidden), np.float32))
    program.reserve(4 * len(TOKENS))  # workspaces move
    with pytest.raises(ValueError, match=r"the last step's are \[0, 0\]"):
        program.hidden(np.empty((2, GOLDEN.hidden), np.float32))
