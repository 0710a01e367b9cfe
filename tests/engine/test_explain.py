""" "Why did it reprocess my whole prompt?" Every reason, in numbers and in words."""

import random

import pytest
from support.tiny import VOCAB, blocks_of_16, engine_of, finish

from kvarn.engine.explain import explain, in_words, to_json
from kvarn.engine.params import SamplingParams
from kvarn.words import counted

RNG = random.Random(8)
TEXT = [RNG.randrange(VOCAB) for _ in range(100)]
ONE = SamplingParams(max_tokens=1)


def spell(tokens) -> str:
    return " ".join(f"w{token}" for token in tokens)


def ask(engine, prompt: list[int], **kw) -> dict:
    request = engine.add(prompt, ONE, **kw)
    finish(engine)
    found = to_json(explain(request), spell)
    assert found["prompt_tokens"] == len(prompt) == found["reused_tokens"] + found["recomputed_tokens"]
    assert found["recompute_ms"] > 0
    assert found["summary"].startswith(f"reused {found['reused_tokens']} of {len(prompt)} prompt tokens, computed ")
    return found


def test_nothing_shared_then_everything_then_something_new() -> None:
    engine = engine_of()
    found = ask(engine, TEXT)
    assert found["reuse_ended"] == {"reason": "nothing shared", "at": 0}
    assert found["summary"].endswith("no earlier text begins like this one")
    found = ask(engine, TEXT)
    assert (found["reused_tokens"], found["reuse_ended"]["reason"]) == (99, "nothing left to reuse")
    found = ask(engine, [*TEXT, 1, 2, 3])
    assert (found["reused_tokens"], found["reuse_ended"]) == (100, {"reason": "new from here on", "at": 100})
    assert found["summary"].endswith("the earlier text ends at token 100, what follows is new")


def test_differs_with_both_tokens_and_words_around_them() -> None:
    engine = engine_of()
    ask(engine, TEXT)
    changed = [*TEXT[:41], (TEXT[41] + 1) % VOCAB, *TEXT[42:]]
    found = ask(engine, changed)
    assert found["reused_tokens"] == 41
    assert found["reuse_ended"] == {
        "reason": "differs",
        "at": 41,
        "before": spell(TEXT[33:41]),
        "ours": {"token": changed[41], "text": spell(changed[41:42]), "onward": spell(changed[41:49])},
        "theirs": {"token": TEXT[41], "text": spell(TEXT[41:42]), "onward": spell(TEXT[41:49])},
    }
    assert f'it continued "{spell(TEXT[41:49])}" (token {TEXT[41]}), now ' in found["summary"]


def test_another_salt_learns_nothing() -> None:
    engine = engine_of()
    ask(engine, TEXT, salt=b"alice")
    found = ask(engine, [*TEXT[:41], 7, 7, 7], salt=b"bob")
    assert found["reuse_ended"] == {"reason": "nothing shared", "at": 0}
    assert spell(TEXT[41:42]) not in found["summary"]


def test_evicted_and_when() -> None:
    engine = engine_of(block_size=16, cache_bytes=blocks_of_16(8))
    ask(engine, TEXT)
    ask(engine, [token ^ 1 if token ^ 1 < VOCAB else 0 for token in TEXT])
    found = ask(engine, TEXT)
    assert found["reuse_ended"]["reason"] == "evicted"
    assert found["reuse_ended"]["at"] > found["reused_tokens"]
    assert found["reuse_ended"]["when"] > 1.7e9
    assert "evicted at " in found["summary"]


def test_out_of_window() -> None:
    engine = engine_of(strategy="sliding", window=20, block_size=16, max_seqs=1, max_batch_tokens=32)
    ask(engine, TEXT)
    ask(engine, TEXT[::-1])
    found = ask(engine, [*TEXT[:48], 7, 7, 7])
    assert found["reuse_ended"]["reason"] in ("out of window", "evicted")
    engine = engine_of(strategy="ring", window=20, block_size=16, max_seqs=1, max_batch_tokens=16)
    ask(engine, TEXT, conversation="c")
    found = ask(engine, [*TEXT[:20], 7], conversation="c")
    assert found["reuse_ended"] == {"reason": "out of window", "at": 20}
    assert "20 tokens were known, but 20 of them had left the window" in found["summary"]


@pytest.mark.parametrize("strategy", ["contiguous", "ring", "sinks"])
def test_strategy_does_not_share(strategy: str) -> None:
    engine = engine_of(strategy=strategy)
    ask(engine, TEXT)
    found = ask(engine, TEXT)
    assert (found["reused_tokens"], found["reuse_ended"]["reason"]) == (0, "strategy does not share")
    assert found["summary"].endswith("this cache strategy does not share prefixes; paged does")


def test_preemptions_are_explained() -> None:
    engine = engine_of(max_seqs=3, max_batch_tokens=32, block_size=16, cache_bytes=blocks_of_16(9))
    requests = [engine.add(TEXT[i : i + 50], SamplingParams(max_tokens=40)) for i in (0, 20, 40)]
    finish(engine)
    preempted = [explain(request) for request in requests if request.preemptions]
    assert preempted
    for found in preempted:
        assert found.recomputed_tokens > 0
        assert (
            f"preempted {counted(found.preemptions, 'time')}, which computed {found.recomputed_tokens} tokens"
            in in_words(found, spell)
        )


def test_a_request_that_never_started_is_explained() -> None:
    engine = engine_of()
    request = engine.add(TEXT, ONE)
    engine.cancel(request)
    found = to_json(explain(request), spell)
    assert (found["queued_ms"], found["first_token_ms"]) == (None, None)
    assert found["total_ms"] is not None


def test_a_request_cancelled_in_its_prompt_is_explained() -> None:
    engine = engine_of(max_seqs=1, max_batch_tokens=32)
    ask(engine, TEXT[:20])
    first, second = engine.add(TEXT, ONE), engine.add(TEXT, ONE)
    engine.step()
    for request in (first, second):
        engine.cancel(request)
    found, waited = (to_json(explain(request), spell) for request in (first, second))
    assert (found["reused_tokens"], found["recomputed_tokens"], found["cancelled"]) == (20, 32, True)
    assert found["summary"].endswith("what follows is new; cancelled with 48 prompt tokens to go")
    assert found["first_token_ms"] is None
    assert (waited["reuse_ended"], waited["recomputed_tokens"], waited["cancelled"]) == (None, 0, True)
    assert waited["queued_ms"] is None
    assert not ask(engine, TEXT)["cancelled"]
