"""What crosses between bookkeeping, devices and the engine: steps, blocks as bytes, K and V of unequal width, masks."""

import itertools
import pickle

import numpy as np
import pytest
from support import tiny
from support.harness import Driven, assert_near, backend, bits, chunks, drive, expect, fill_with_nan, inputs, named
from support.null_backend import TOKEN

from kvarn.arrays import Doubles
from kvarn.backends import open_backend
from kvarn.backends.cpu import Cpu
from kvarn.backends.reference import Reference, dense
from kvarn.cache.cache import KVCache
from kvarn.cache.codec import CODECS
from kvarn.cache.layouts import LAYOUTS
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.cache.step import Copy, GroupStep, RowEdit, Step
from kvarn.engine import scheduler
from kvarn.engine.config import EngineConfig
from kvarn.engine.request import SamplingParams
from kvarn.errors import BadArray, KvarnError

SPEC = LayerSpec(4, 2, 8, 8)


def test_a_step_is_integers_that_can_be_sent_to_another_process() -> None:
    """Two sequences, the second forked off the first in mid-block: a copy, a row and a token for each."""
    cache = KVCache(plan(CacheConfig([SPEC], 64, "paged", "f32", block_size=16, max_seqs=2)))
    cache.open(0)
    cache.reserve(0, 18)
    first = cache.prepare([0])
    assert first == Step(
        seqs=(0,),
        rows=[0],
        n_new=[18],
        positions=list(range(18)),
        groups=(GroupStep([], [RowEdit(0, 0, [0, 1], [0, 16])], [2], [18], list(range(18))),),
    )
    cache.launched(first)
    cache.commit(0, range(18))
    cache.fork(0, 1)
    for seq in (0, 1):
        cache.reserve(seq, 19)
    second = cache.prepare([1, 0])
    assert second == Step(
        seqs=(0, 1),
        rows=[0, 1],
        n_new=[1, 1],
        positions=[18, 18],
        groups=(
            GroupStep(
                moves=[Copy(1, 2, 2)],
                edits=[RowEdit(0, 1, [2], [16]), RowEdit(1, 0, [0, 1], [0, 16])],
                n_blocks=[2, 2],
                kv_len=[19, 19],
                cells=[2 * 16 + 2, 1 * 16 + 2],
            ),
        ),
    )
    assert pickle.loads(pickle.dumps(second)) == second
    cache.launched(second)
    with pytest.raises(KvarnError, match="it has moved since this step"):
        cache.launched(second)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("codec", CODECS)
def test_a_block_as_bytes_is_the_same_whatever_the_layout(codec: str) -> None:
    """What one layout's cache computed goes on in another's, to the bit."""
    x, (before, after) = inputs(SPEC, 45, seed=3), chunks(0, 40, 5)
    data = {(0, layer): inputs(SPEC, 45, seed=layer) for layer in range(2)} | {(0, 0): x}
    caches = {}
    for layout in LAYOUTS:
        config = CacheConfig([SPEC] * 2, 64, "paged", codec, layout=layout, block_size=32, max_chunk=64)
        caches[layout] = Driven(config, backend())
        fill_with_nan(caches[layout])
    whole = drive(caches["token-major"], [before, after], data)
    blocks = [block for block, _ in caches["token-major"].placements[0].blocks(0)]
    held = [caches["token-major"].memory.read_block(0, block) for block in blocks]
    for layout, cache in caches.items():
        if layout == "token-major":
            continue
        cache.open(0)
        for start, length in ((0, 40), (40, 45)):
            cache.reserve(0, length)
            cache.prepare([0])
            if start == 0:
                for (block, _), bytes_ in zip(cache.placements[0].blocks(0), held, strict=True):
                    cache.memory.write_block(0, block, bytes_)
                    assert cache.memory.read_block(0, block) == bytes_, layout
                cache.commit(0, range(40))
        for layer in range(2):
            one = data[0, layer]
            cache.write(layer, one.k[40:], one.v[40:])
            assert (bits(cache.attend(layer, one.q[40:])) == bits(whole[0, layer][40:])).all(), layout
        with pytest.raises(BadArray, match="bytes, not 3"):
            cache.memory.write_block(0, 0, b"abc")


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_and_values_may_differ_in_width(layout: str, codec: str) -> None:
    spec = LayerSpec(4, 2, 12, 6, window=20, pinned=3)
    config = CacheConfig([spec], 64, "paged", codec, layout=layout, block_size=32)
    cache = Driven(config, Reference())
    fill_with_nan(cache)
    x = inputs(spec, 50, seed=1)
    found = drive(cache, chunks(0, 33, 1, 16), {(0, 0): x})[0, 0]
    assert found.shape == (50, 4, 6)
    assert_near(found, expect(x, spec, codec))
    per_token = CODECS[codec].k_row(12).nbytes + CODECS[codec].v_row(6).nbytes
    assert cache.plan.bytes_per_token == per_token * (4 if layout == "repeated" else 2)
    with pytest.raises(KvarnError, match="the cpu backend wants them equal"):
        Cpu().memory(plan(config))


def test_dense_attention_is_the_oracle_of_unequal_widths() -> None:
    spec = LayerSpec(2, 1, 12, 6)
    x = inputs(spec, 9, seed=2)
    one = dense.attend(x.q, x.k, x.v[..., :1], LayerSpec(2, 1, 12, 1), 1.0)
    assert np.allclose(dense.attend(x.q, x.k, x.v, spec, 1.0)[..., :1], one)


@pytest.mark.usefixtures("reference")
def test_positions_advance_before_tokens_are_named() -> None:
    """Two steps in flight under a window: the second is prepared, and has its block, before the first is named."""
    spec = LayerSpec(2, 1, 8, 8, window=16)
    for strategy in ("ring", "sliding"):
        config = CacheConfig([spec], 128, strategy, "f32", block_size=16, max_chunk=16, window=16, ahead=1)
        cache, x, found = Driven(config, Reference()), inputs(spec, 100, seed=4), []
        fill_with_nan(cache)
        cache.open(0)
        for position in range(100):
            assert cache.reserve(0, position + 1)
            step = cache.prepare([0])
            cache.write(0, x.k[position : position + 1], x.v[position : position + 1])
            found.append(cache.attend(0, x.q[position : position + 1]))
            cache.launched(step)
            if position:
                cache.book.commit(0, [position - 1])  # what the step before sampled is known by now
            cache.check()
        assert_near(np.concatenate(found), expect(x, spec, "f32"), strategy)


def test_backends_are_opened_by_name() -> None:
    assert open_backend("cpu", threads=1).facts().keys() == {"name", "isa", "order"}
    assert open_backend("reference").facts() == {"name": "reference"}
    with pytest.raises(KvarnError, match="unknown backend 'gpu'; there are: cpu, reference"):
        open_backend("gpu")
    for name, threads in itertools.product(("cpu", "reference"), (0, 5000)):
        with pytest.raises(KvarnError, match="threads"):
            open_backend(name, threads)


@pytest.mark.parametrize("name", ["max_batch_tokens", "chunk_while_decoding", "max_waiting"])
def test_an_engine_that_could_not_move_is_refused(name: str) -> None:
    with pytest.raises(KvarnError, match=f"{name} is 0; it must be at least 1"):
        EngineConfig(**{name: 0})


class Alternating:
    """Only `allowed`, then only what is not."""

    def __init__(self, allowed: list[int]) -> None:
        self.allowed = np.zeros(tiny.VOCAB, bool)
        self.allowed[allowed] = True
        self.accepted: list[int] = []

    def mask(self, scores: Doubles) -> None:
        scores[self.allowed if len(self.accepted) % 2 else ~self.allowed] = -np.inf

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.5, "top_p": 0.9}, {"frequency_penalty": 1.0, "n": 3}])
def test_a_constraint_masks_each_sample_by_what_it_said(params: dict) -> None:
    engine, allowed = tiny.engine_of(max_seqs=2, cache_bytes=None), [3, 5, 8]
    made: dict[int, Alternating] = {}

    def constrain(k: int) -> Alternating:
        return made.setdefault(k, Alternating(allowed))

    settings = SamplingParams(max_tokens=9, seed=1, **params)
    bound = engine.add([1, 2, 3], settings, constrain=constrain)
    free = engine.add([1, 2, 3], settings)
    tiny.finish(engine)
    for sample in bound.samples:
        assert [token in allowed for token in sample.output] == [i % 2 == 0 for i in range(9)]
        assert made[sample.index].accepted == sample.output
    alone = tiny.engine_of(max_seqs=2)
    again = alone.add([1, 2, 3], settings)
    tiny.finish(alone)
    assert [s.output for s in again.samples] == [s.output for s in free.samples], "others are not masked"


def test_a_constraint_that_allows_nothing_fails_its_request_only() -> None:
    engine = tiny.engine_of()
    bound = engine.add([1, 2, 3], SamplingParams(max_tokens=5), constrain=lambda k: Alternating([]))
    free = engine.add([4, 5], SamplingParams(max_tokens=5))
    tiny.finish(engine)
    assert (bound.samples[0].finish_reason, free.samples[0].finish_reason) == ("error", "length")
    assert "allows no token" in str(bound.error)


def test_a_step_that_is_lost_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program fails before it applies the step: copies and edits are gone, answers are not."""
    params = SamplingParams(max_tokens=12, temperature=1.3, seed=3, n=3)
    prompts = [list(range(20)), list(range(18)), list(range(40, 60))]
    expected = []
    for prompt in prompts:
        engine = tiny.engine_of(max_seqs=6, block_size=16)
        expected.append(engine.add(prompt, params))
        tiny.finish(engine)
    engine = tiny.engine_of(max_seqs=6, block_size=16)
    run, calls = engine.program.run, itertools.count()

    def failing(*args):
        if next(calls) in (2, 3, 9):
            raise RuntimeError("the launch failed")
        return run(*args)

    monkeypatch.setattr(engine.program, "run", failing)
    requests = [engine.add(prompt, params) for prompt in prompts]
    failed = 0
    while engine.busy:
        try:
            engine.step()
        except RuntimeError as error:
            engine.isolate(error)
            failed += 1
        engine.cache.check()
    assert failed == 3
    good = [r for r in requests if r.error is None]
    assert len(good) >= 1, "a fault that comes back while a request is alone is taken for its own"
    for request, wanted in zip(requests, expected, strict=True):
        if request.error is None:
            assert [s.output for s in request.samples] == [s.output for s in wanted.samples]
    assert engine.cache.usage().sequences == engine.cache.usage().blocks_used == 0


def test_several_rows_of_a_sequence_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of every row of every chunk: the newest row is sampled, as if it were alone."""
    prompts, params = [[5, 6, 7, 8, 9], [1], list(range(30, 60))], SamplingParams(max_tokens=8, n=2, seed=1)
    answers = []
    for every_row in (False, True):
        if every_row:
            monkeypatch.setattr(scheduler, "_work", lambda sample, n: scheduler.Work(sample, n, n))
        engine = tiny.engine_of(max_batch_tokens=16, max_seqs=6)
        requests = [engine.add(prompt, params) for prompt in prompts]
        tiny.finish(engine)
        answers.append([[sample.output for sample in request.samples] for request in requests])
    assert answers[0] == answers[1]


@pytest.mark.any_backend
def test_prefill_and_decode_are_told_apart_by_what_they_compute(computing: bool) -> None:
    """A prompt of one token is a prefill; only sampled tokens are decoded."""
    engine = tiny.engine_of(max_batch_tokens=4)
    engine.add([1], SamplingParams(max_tokens=3))
    engine.add([2, 3, 4, 5, 6], SamplingParams(max_tokens=1))
    tiny.finish(engine)
    stats = engine.stats
    assert stats.prefill_tokens + stats.decode_tokens == 1 + 2 + 5
    assert stats.decode_tokens in (1, 2)
    if not computing:
        steps = engine.memory.steps
        assert [sum(step.n_new) for step in steps][:2] == [4, 3]
        assert TOKEN not in (1, 2)


def test_a_placement_is_told_positions_and_names_apart() -> None:
    placement = KVCache(plan(CacheConfig([SPEC], 64, "paged", "f32", block_size=16, ahead=2))).placements[0]
    placement.open(0)
    placement.reserve(0, 16)
    placement.advance(0, 16)
    placement.open(1)
    assert placement.match(1, list(range(16)), 15).reused == 0, "nobody knows yet what was written"
    placement.commit(0, range(16))
    assert placement.match(1, list(range(16)), 15).reused == 15
    placement.reserve(0, 17)
    named(placement, 0, [16])
    placement.check()
