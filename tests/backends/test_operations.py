"""Operations of models on the native backend: near the reference, and the same bits on every instruction set.

An entry of CASES is what a tiny Llama with one layer does after attention. An activation is a case by itself.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from support import tiny_gguf
from support.harness import Driven, bits, pool, score, using
from support.tiny_models import GOLDEN

from kvarn import native
from kvarn.backends.cpu import Cpu
from kvarn.backends.cpu.program import load_program
from kvarn.backends.reference import Reference, load_weights
from kvarn.backends.reference.program import ReferenceProgram
from kvarn.cache.plan import CacheConfig
from kvarn.graph.ops import Activation
from kvarn.graph.record import record
from kvarn.loading.checkpoint import Checkpoint, open_checkpoint
from kvarn.models import llama
from kvarn.models.config import ModelConfig

TEXT = np.random.default_rng(5).integers(0, GOLDEN.vocab_size, 20).tolist()
Part = Callable[[Any, Any], Any]  # (ops, x) -> x


def gated(activation: Activation) -> Part:
    def part(ops: Any, x: Any) -> Any:
        h = ops.rms_norm(x, "blk.0.ffn_norm.weight")
        gate, up = ops.linear(h, "blk.0.ffn_gate.weight"), ops.linear(h, "blk.0.ffn_up.weight")
        return ops.add(x, ops.linear(ops.gated(gate, up, activation), "blk.0.ffn_down.weight"))

    return part


def norm_and_add(ops: Any, x: Any) -> Any:
    h = ops.linear(ops.rms_norm(x, "blk.0.ffn_norm.weight"), "blk.0.attn_output.weight")
    return ops.add(x, ops.rms_norm(h, "blk.0.ffn_norm.weight"))


CASES: dict[str, Part] = {activation: gated(activation) for activation in get_args(Activation)} | {
    "norm and add": norm_and_add,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(tiny_gguf.write(Path(tmp_path_factory.mktemp("tiny")) / "tiny.gguf", "llama"))


@pytest.mark.parametrize("part", CASES.values(), ids=CASES)
def test_an_operation_is_near_the_reference_and_has_one_result(checkpoint: Checkpoint, part: Part) -> None:
    def forward(ops: Any, config: ModelConfig) -> Any:
        x = ops.embed("token_embd.weight")
        x = ops.add(x, llama.attention(ops, config, 0, ops.rms_norm(x, "blk.0.attn_norm.weight")))
        return llama.output(ops, part(ops, x))

    config = replace(checkpoint.config, n_layers=1, windows=checkpoint.config.windows[:1])
    graph = record(forward, config, checkpoint.shapes)

    def logits(program: Any, place: Any, chunk: int) -> np.ndarray:
        cache = CacheConfig(config.layer_specs, 32, "paged", "f32")
        return score(program, Driven(cache, place), TEXT, 0, chunk)

    slow = ReferenceProgram(config, load_weights(checkpoint, graph), forward=forward)
    oracle = logits(slow, Reference(), len(TEXT))
    results = []
    for name in native.isas():
        for chunk in (len(TEXT), 1):  # a single row takes a way of its own (native/program.cpp)
            with using(name):
                results.append(logits(load_program(checkpoint, graph, pool()), Cpu(pool()), chunk))
    assert np.abs(results[0] - oracle).max() < 1e-4 * np.abs(oracle).max()
    for result in results[1:]:
        assert (bits(result) == bits(results[0])).all()
