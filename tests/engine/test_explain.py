""" "Why did it reprocess my whole prompt?" Every reason, in numbers and in words."""

import random

import pytest
from support.tiny import VOCAB, blocks_of_16, engine_of, finish

from kvarn.engine.explain import explain, in_words, to_json
from kvarn.engine.request import SamplingParams

RNG = random.Random(8)
TEXT = [RNG.randrange(VOCAB) for _ in range(100)]
ONE = SamplingParams(max_tokens=1)


def spell(tokens) -> str:
    return " ".join(f"w{token}" for token in tokens)


def ask(engine, prompt: list[int], **kw) -> dict:
    request = engine.add(prompt, ONE, **kw)
    finish(engine)
    told = to_json(explain(request), spell)
    assert told["prompt_tokens"] == len(prompt) == told["reused_tokens"] + told["recomputed_tokens"]
    assert told["recompute_ms"] > 0
    assert told["summary"].startswith(f"reused {told['reused_tokens']} of {len(prompt)} prompt tokens, computed ")
    return told


def test_nothing_shared_then_everything_then_something_new() -> None:
    engine = engine_of()
    told = ask(engine, TEXT)
    assert told["reuse_ended"] == {"reason": "nothing shared", "at": 0}
    assert told["summary"].endswith("no earlier text begins like this one")
    told = ask(engine, TEXT)
    assert (told["reused_tokens"], told["reuse_ended"]["reason"]) == (99, "nothing left to reuse")
    told = ask(engine, [*TEXT, 1, 2, 3])
    assert (told["reused_tokens"], told["reuse_ended"]) == (100, {"reason": "new from here on", "at": 100})
    assert told["summary"].endswith("the earlier text ends at token 100, what follows is new")


def test_differs_with_both_tokens_and_words_around_them() -> None:
    engine = engine_of()
    ask(engine, TEXT)
    changed = [*TEXT[:41], (TEXT[41] + 1) % VOCAB, *TEXT[42:]]
    told = ask(engine, changed)
    assert told["reused_tokens"] == 41
    assert told["reuse_ended"] == {
        "reason": "differs",
        "at": 41,
        "before": spell(TEXT[33:41]),
        "ours": {"token": changed[41], "text": spell(changed[41:42]), "onward": spell(changed[41:49])},
        "theirs": {"token": TEXT[41], "text": spell(TEXT[41:42]), "onward": spell(TEXT[41:49])},
    }
    assert f'it continued "{spell(TEXT[41:49])}" (token {TEXT[41]}), now ' in told["summary"]


def test_another_salt_learns_nothing() -> None:
    engine = engine_of()
    ask(engine, TEXT, salt=b"alice")
    told = ask(engine, [*TEXT[:41], 7, 7, 7], salt=b"bob")
    assert told["reuse_ended"] == {"reason": "nothing shared", "at": 0}
    assert spell(TEXT[41:42]) not in told["summary"]


def test_evicted_and_when() -> None:
    engine = engine_of(block_size=16, cache_bytes=blocks_of_16(8))
    ask(engine, TEXT)
    ask(engine, [token ^ 1 if token ^ 1 < VOCAB else 0 for token in TEXT])
    told = ask(engine, TEXT)
    assert told["reuse_ended"]["reason"] == "evicted"
    assert told["reuse_ended"]["at"] > told["reused_tokens"]
    assert told["reuse_ended"]["when"] > 1.7e9
    assert "evicted at " in told["summary"]


def test_out_of_window() -> None:
    engine = engine_of(strategy="sliding", window=20, block_size=16, max_seqs=1, max_batch_tokens=32)
    ask(engine, TEXT)
    ask(engine, TEXT[::-1])
    told = ask(engine, [*TEXT[:48], 7, 7, 7])
    assert told["reuse_ended"]["reason"] in ("out of window", "evicted")
    engine = engine_of(strategy="ring", window=20, block_size=16, max_seqs=1, max_batch_tokens=16)
    ask(engine, TEXT, conversation="c")
    told = ask(engine, [*TEXT[:20], 7], conversation="c")
    assert told["reuse_ended"] == {"reason": "out of window", "at": 20}
    assert "20 tokens were known, but 20 of them had left the window" in told["summary"]


@pytest.mark.parametrize("strategy", ["contiguous", "ring", "sinks"])
def test_strategy_does_not_share(strategy: str) -> None:
    engine = engine_of(strategy=strategy)
    ask(engine, TEXT)
    told = ask(engine, TEXT)
    assert (told["reused_tokens"], told["reuse_ended"]["reason"]) == (0, "strategy does not share")
    assert told["summary"].endswith("this cache strategy does not share prefixes; paged does")


def test_a_preemption_is_part_of_the_story() -> None:
    engine = engine_of(max_seqs=3, max_batch_tokens=32, block_size=16, cache_bytes=blocks_of_16(9))
    requests = [engine.add(TEXT[i : i + 50], SamplingParams(max_tokens=40)) for i in (0, 20, 40)]
    finish(engine)
    preempted = [explain(request) for request in requests if request.preemptions]
    assert preempted
    for found in preempted:
        assert found.recomputed_tokens > 0
        assert f"preempted {found.preemptions} times, which computed {found.recomputed_tokens} tokens" in in_words(
            found, spell
        )


def test_what_never_started_is_explained_too() -> None:
    engine = engine_of()
    request = engine.add(TEXT, ONE)
    engine.cancel(request)
    told = to_json(explain(request), spell)
    assert (told["queued_ms"], told["first_token_ms"]) == (None, None)
    assert told["total_ms"] is not None


def test_cancelled_on_the_way() -> None:
    engine = engine_of(max_seqs=1, max_batch_tokens=32)
    ask(engine, TEXT[:20])
    first, second = engine.add(TEXT, ONE), engine.add(TEXT, ONE)
    engine.step()
    for request in (first, second):
        engine.cancel(request)
    told, waited = (to_json(explain(request), spell) for request in (first, second))
    assert (told["reused_tokens"], told["recomputed_tokens"], told["cancelled"]) == (20, 32, True)
    assert told["summary"].endswith("what follows is new; cancelled with 48 prompt tokens to go")
    assert told["first_token_ms"] is None
    assert (waited["reuse_ended"], waited["recomputed_tokens"], waited["cancelled"]) == (None, 0, True)
    assert waited["queued_ms"] is None
    assert not ask(engine, TEXT)["cancelled"]
