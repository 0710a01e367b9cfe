"""Kernels over the tables of every strategy: each instruction set gives the bits of the best one, and the best one
comes near the oracle.

The steps are recorded once and replayed (support/replay.py): no bookkeeping is repeated per instruction set. Blocks are
shuffled, and the sequences of a step are fragmented among each other. One thread: what several threads change is in
test_native_attention.py.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from support import harness
from support.axes import CONTEXT, PAIRS, SPECS, allowed, block_sizes, config_of
from support.harness import MIX, Schedule, assert_near, bits, expect, pool
from support.replay import Recording, data_of, record, replay

from kvarn import native
from kvarn.backends.cpu import Cpu
from kvarn.backends.reference import Reference
from kvarn.cache.codec import CODECS
from kvarn.cache.layouts import LAYOUTS
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec
from kvarn.cache.strategy import STRATEGIES

SCHEDULES: dict[str, Schedule] = MIX | {
    f"chunks of {size}": [{0: min(size, CONTEXT - start)} for start in range(0, CONTEXT, size)]
    for size in (1, 5, 16, 48)
}
SEQUENCES = 3  # in all schedules together


class Case(NamedTuple):
    strategy: str
    layout: str
    block_size: int | None


def cases(backend: str) -> list[Case]:
    """All of them with the best instruction set. A kernel sees blocks and first positions, and no strategy: for the
    other sets one table that only grows (paged) and one whose blocks are written again (ring) are enough. The
    reference and the portable kernels are slow; they get the blocks of one tile."""
    strategies = list(STRATEGIES) if backend == native.isas()[0] else ["ring", "paged"]
    slow = backend in ("reference", "portable")
    return [
        Case(strategy, layout, size)
        for strategy in strategies
        for layout in LAYOUTS
        for size in ((32,) if slow else block_sizes(strategy))
    ]


def place_of(backend: str) -> Reference | Cpu:
    return Reference() if backend == "reference" else Cpu(pool(1))


@cache
def recorded(spec: LayerSpec, strategy: str, block_size: int | None, schedule: str) -> Recording:
    return record(config_of(spec, strategy, None, block_size), SCHEDULES[schedule])


@cache
def expected(on_cpu: bool, spec: LayerSpec, codec: str) -> list[np.ndarray]:
    """By sequence, alone and in one piece, from the best instruction set: near the oracle."""
    plain = CacheConfig([spec], CONTEXT, "contiguous", codec, max_chunk=CONTEXT, max_seqs=SEQUENCES)
    recording = record(plain, [{seq: CONTEXT} for seq in range(SEQUENCES)])
    backend = native.isas()[0] if on_cpu else "reference"
    with harness.using(backend):
        output = replay(recording, place_of(backend), "token-major", codec)
        for seq in range(SEQUENCES):
            assert_near(output[seq], expect(data_of(spec, CONTEXT, seq), spec, codec), seq)
    return [output[seq] for seq in range(SEQUENCES)]


def differs(backend: str, recording: Recording, layout: str | None, codec: str) -> bool:
    (spec,) = recording.config.layers
    known = expected(backend != "reference", spec, codec)
    output = replay(recording, place_of(backend), layout, codec)
    return not all((bits(rows) == bits(known[seq][: len(rows)])).all() for seq, rows in output.items())


@pytest.mark.requirement(33, 34)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_table_layout_and_codec_gives_the_same_bits(spec: LayerSpec, codec: str, backend: str) -> None:
    """A failure lists every combination that differs."""
    tried = [
        case for case in cases(backend) if allowed(config_of(spec, case.strategy, case.layout, case.block_size, codec))
    ]
    assert {case.layout for case in tried} >= set(LAYOUTS) - ({"repeated"} if spec.group == 1 else set())
    wrong = [
        case
        for case in tried
        if differs(backend, recorded(spec, case.strategy, case.block_size, "mixed"), case.layout, codec)
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("codec", PAIRS)
@pytest.mark.parametrize("spec", [SPECS["gqa"], SPECS["pinned"]], ids=["gqa", "pinned"])
def test_k_and_v_in_different_codecs(spec: LayerSpec, codec: str, backend: str) -> None:
    recording = recorded(spec, "paged", 32, "mixed")
    layouts = [layout for layout in LAYOUTS if allowed(config_of(spec, "paged", layout, 32, codec))]
    assert not [layout for layout in layouts if differs(backend, recording, layout, codec)]


@pytest.mark.requirement(21)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_batches_and_chunks_do_not_change_a_bit(spec: LayerSpec, schedule: str, backend: str) -> None:
    """The mixes in every codec. A text alone in equal chunks in f32 and bf16, whose arithmetic is that of f16 and
    int8."""
    recording = recorded(spec, "paged", None, schedule)
    codecs = CODECS if schedule in MIX else ("f32", "bf16")
    wrong = [codec for codec in codecs if differs(backend, recording, None, codec)]
    assert not wrong, wrong
