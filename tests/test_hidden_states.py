"""Hidden states of the native backend: what the logits of a step were made of, for as many rows as it asked for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
from harness import bits, pool

from kvarn.backends.base import Backend
from kvarn.backends.cpu import Cpu
from kvarn.backends.cpu.program import CpuProgram, load_program
from kvarn.backends.reference import Reference
from kvarn.backends.reference.ops import ReferenceOps
from kvarn.backends.reference.program import ReferenceProgram
from kvarn.cache.cache import KVCache
from kvarn.cache.plan import CacheConfig
from kvarn.llm import load_weights
from kvarn.loading.checkpoint import Checkpoint, open_checkpoint
from kvarn.models.architectures import forward_of
from kvarn.progress import quiet

TOKENS = [5, 77, 3, 200, 9, 41, 41]
ROWS = ([6], [0], [2, 6], [6, 1, 3], list(range(7)))  # a single row takes a way of its own (native/program.cpp)


def step(program: CpuProgram | ReferenceProgram, backend: Backend, tokens: list[int], rows: list[int]) -> np.ndarray:
    """Logits of these rows of a text in one step."""
    cache = KVCache(CacheConfig(program.config.layer_specs, 32, "paged", "f32"), backend)
    cache.open(0)
    assert cache.reserve(0, len(tokens))
    positions = cache.prepare([0]).positions
    return program.run(cache, np.array(tokens), positions, np.array(rows)).copy()


def reference_hidden(checkpoint: Checkpoint) -> np.ndarray:
    """The final norm of every row."""
    norms: list[np.ndarray] = []

    class Noting(ReferenceOps):
        def rms_norm(self, *args: Any) -> np.ndarray:
            norms.append(super().rms_norm(*args))
            return norms[-1]

    def forward(ops: ReferenceOps, config: Any) -> Any:
        ops.__class__ = Noting
        return forward_of(config.architecture)(ops, config)

    program = ReferenceProgram(checkpoint.config, load_weights(checkpoint, quiet))
    program._forward = forward
    step(program, Reference(), TOKENS, [0])
    return norms[-1]


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3", "gemma3", "phi3"])
def test_hidden_states_are_the_reference_s(variant: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_gguf.write(tmp_path / "tiny.gguf", variant))
    expected = reference_hidden(checkpoint)
    for threads in (1, 3):
        program = load_program(checkpoint, pool(threads))
        for rows in ROWS:
            logits = step(program, Cpu(pool(threads)), TOKENS, rows)
            hidden = program.hidden_of(len(rows))
            assert np.abs(hidden - expected[rows]).max() < 1e-4 * np.abs(expected).max(), (threads, rows)
            again = step(program, Cpu(pool(threads)), TOKENS, rows)
            assert (bits(again) == bits(logits)).all()
            assert (bits(program.hidden_of(len(rows))) == bits(hidden)).all()


def test_hidden_states_that_are_not_there_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_gguf.write(tmp_path / "tiny.gguf", "llama"))
    program, hidden = load_program(checkpoint, pool()), tiny_gguf.HIDDEN
    with pytest.raises(ValueError, match=r"the last step's are \[0, 0\], out is .*1, 128"):
        program.hidden_of(1)
    step(program, Cpu(pool()), TOKENS, [1, 2])
    with pytest.raises(ValueError, match=rf"the last step's are \[2, {hidden}\]"):
        program.hidden_of(3)
    program.reserve(4 * len(TOKENS))  # workspaces move
    with pytest.raises(ValueError, match=r"the last step's are \[0, 0\]"):
        program.hidden_of(2)
