"""Turns of a conversation go on in the cache, whatever the strategy: recomputed tokens are counted."""

import random

import pytest
from support.tiny import VOCAB, alone, engine_of, finish

from kvarn.cache.adoption import Reason, ReuseLimit
from kvarn.cache.placements import PLACEMENTS
from kvarn.cache.strategy import STRATEGIES
from kvarn.engine.params import SamplingParams
from kvarn.engine.request import Request

RNG = random.Random(5)
FIRST = [RNG.randrange(VOCAB) for _ in range(70)]
NEXT = [RNG.randrange(VOCAB) for _ in range(9)]
SHORT = SamplingParams(max_tokens=12)
KEEPING = [name for name, strategy in STRATEGIES.items() if not PLACEMENTS[strategy.placement].shares]


def turn(engine, prompt: list[int], params: SamplingParams = SHORT, conversation: object = "c", **kw) -> Request:
    request = engine.add(prompt, params, conversation=conversation, **kw)
    finish(engine)
    return request


def computed(engine) -> int:
    return engine.stats.prefill_tokens + engine.stats.decode_tokens


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_turn_computes_only_what_is_new(strategy: str) -> None:
    engine = engine_of(strategy=strategy, max_seqs=1)
    history = turn(engine, FIRST).samples[0].tokens
    before = computed(engine)
    second = turn(engine, [*history, *NEXT])
    reusable = len(history) - 1  # the last sampled token was never computed
    assert second.adoption is not None
    assert second.adoption.reused == reusable
    assert computed(engine) - before == len(history) + len(NEXT) - reusable + 11
    assert second.samples[0].output == alone([*history, *NEXT], SHORT)
    assert engine.stats.cached_tokens == engine.cache.usage().prefix_hits == reusable


@pytest.mark.parametrize("strategy", KEEPING)
def test_a_turn_that_differs_rewinds_to_the_common_prefix(strategy: str) -> None:
    """The answer's text, tokenized again, is not always the tokens that were sampled."""
    engine = engine_of(strategy=strategy, max_seqs=1)
    history = turn(engine, FIRST).samples[0].tokens
    changed = [*history[:75], (history[75] + 1) % VOCAB, *NEXT]
    second = turn(engine, changed)
    assert second.adoption is not None
    assert second.adoption.reused == 75
    assert second.adoption.limit[:4] == (Reason.DIFFERS, 75, changed[75], history[75])
    assert second.adoption.limit.onward == tuple(history[75:81])
    assert second.samples[0].output == alone(changed, SHORT)
    third = turn(engine, FIRST[:30])
    assert third.adoption == (29, ReuseLimit(Reason.END, 29))


def test_a_ring_rewinds_only_to_what_is_intact() -> None:
    """Window 32, chunks of 16: three blocks and a half. Back by a little is possible, back to the start is not."""
    engine = engine_of(strategy="ring", max_seqs=1, window=32, block_size=16, max_batch_tokens=16)
    history = turn(engine, FIRST).samples[0].tokens
    again = turn(engine, [*history[:-4], *NEXT])
    assert again.adoption is not None
    assert again.adoption.reused == len(history) - 4
    lost = turn(engine, [*FIRST[:20], *NEXT])
    assert lost.adoption == (0, ReuseLimit(Reason.OUT_OF_WINDOW, 20))
    fresh = engine_of(strategy="ring", max_seqs=1, window=32, block_size=16, max_batch_tokens=16)
    assert lost.samples[0].output == turn(fresh, [*FIRST[:20], *NEXT]).samples[0].output


def test_parked_sequences_are_dropped_first_when_room_is_needed() -> None:
    engine = engine_of(strategy="contiguous", max_seqs=2)
    for conversation in "ab":
        turn(engine, FIRST, conversation=conversation)
    assert engine.cache.usage().sequences == 2
    turn(engine, NEXT, conversation=None)  # takes the place of the one that waited longest
    assert engine.cache.usage().sequences == 1
    assert turn(engine, [*FIRST, 1], conversation="b").adoption.reused == 70
    assert turn(engine, [*FIRST, 1], conversation="a").adoption.reused == 0
    assert engine.scheduler.n_preemptions == 0


def test_a_cancelled_turn_is_kept_and_a_forgotten_one_is_not() -> None:
    engine = engine_of(strategy="contiguous", max_seqs=1)
    request = engine.add(FIRST, SamplingParams(max_tokens=50), conversation="c")
    for _ in range(5):
        engine.step()
    engine.cancel(request)
    assert turn(engine, [*FIRST, 1, 2, 3]).adoption.reused == 70
    engine.forget("c")
    engine.forget("c")
    assert engine.cache.usage().sequences == engine.cache.usage().blocks_used == 0
    assert turn(engine, FIRST).adoption.reused == 0


def test_a_conversation_belongs_to_its_salt() -> None:
    engine = engine_of(strategy="contiguous", max_seqs=2)
    turn(engine, FIRST, salt=b"alice")
    assert turn(engine, [*FIRST, 1], salt=b"bob").adoption.reused == 0
    assert turn(engine, [*FIRST, 1], salt=b"alice").adoption.reused == 70


def test_a_preempted_request_is_one_query() -> None:
    """Preempted, and with samples that found no room to fork: one request is one query."""
    from support.tiny import blocks_of_16

    engine = engine_of(max_seqs=5, max_batch_tokens=32, block_size=16, cache_bytes=blocks_of_16(12))
    prompts = [[RNG.randrange(VOCAB) for _ in range(60)] for _ in range(4)]
    requests = [engine.add(prompt, SamplingParams(max_tokens=40, n=2, temperature=1, seed=1)) for prompt in prompts]
    finish(engine)
    assert engine.scheduler.n_preemptions > 0
    assert engine.cache.usage().prefix_queries == 4 * 60 == engine.stats.prompt_tokens
    assert engine.cache.usage().prefix_hits == sum(r.adoption.reused for r in requests) == engine.stats.cached_tokens
    assert sum(engine.cache.usage().prefix_misses.values()) == 4


@pytest.mark.parametrize("strategy", KEEPING)
def test_a_turn_that_failed_is_not_continued(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequence is lost with the failed step, so the next turn of the conversation begins anew."""
    engine = engine_of(strategy=strategy, max_seqs=2)
    history = turn(engine, FIRST).samples[0].tokens

    def broken(*arguments: object) -> None:
        raise RuntimeError("a kernel failed")

    with monkeypatch.context() as patch:
        patch.setattr(engine.program, "run", broken)
        failed = engine.add([*history, *NEXT], SHORT, conversation="c")
        with pytest.raises(RuntimeError) as error:
            engine.step()
        engine.isolate(error.value)
    assert str(failed.error) == "a kernel failed"
    assert turn(engine, [*history, *NEXT]).samples[0].output == alone([*history, *NEXT], SHORT)
    engine.forget("c")
    engine.cache.check()
    assert engine.cache.usage().sequences == 0
