"""64 requests at once: each has the tokens and log-probabilities that it has alone."""

import random
from dataclasses import replace

import pytest
from support.tiny import VOCAB, blocks_of_16, engine_of, finish, program_of

from kvarn.cache.codec import codecs_of
from kvarn.cache.plan import CacheConfig, plan
from kvarn.engine.params import SamplingParams
from kvarn.engine.request import Request

N = 64
PROGRAM = program_of()


def plans(rng: random.Random) -> list[tuple[int, list[int], SamplingParams, int | None]]:
    """When each request arrives, its prompt, how it samples, and when it is cancelled."""
    starts = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(4)]
    found = []
    for i in range(N):
        own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
        prompt = [*rng.choice(starts)[: rng.randrange(61)], *own] if i % 4 else own
        params = SamplingParams(max_tokens=rng.randrange(2, 28), logprobs=3)
        if i % 2:
            params = replace(params, temperature=1.2, top_p=0.9, top_k=40, min_p=0.01, seed=i, frequency_penalty=0.5)
        if i % 5 == 0:
            params = replace(params, n=2, seed=i, temperature=0.8)
        cancelled = rng.randrange(1, 25) if i % 4 == 1 else None
        found.append((rng.randrange(120), prompt, params, cancelled))
    return found


def record(events, log: dict) -> None:
    for event in events:
        key = (id(event.sample.request), event.sample.index)
        log.setdefault(key, []).append((event.sampled.token, event.sampled.logprob, event.sampled.top))


def alone(prompt: list[int], params: SamplingParams, codec: str) -> list[list[tuple]]:
    engine = engine_of(PROGRAM, max_batch_tokens=256, max_seqs=2, strategy="contiguous", codec=codec)
    request, log = engine.add(prompt, params), {}
    while engine.busy:
        record(engine.step(), log)
    return [log[(id(request), k)] for k in range(params.n)]


def _tight(codec: str) -> int:
    """Ten blocks of 32, and the tails."""
    made = plan(CacheConfig(PROGRAM.config.layer_specs, 320, "paged", codec, max_seqs=8))
    return made.nbytes - (made.n_blocks - 10) * 32 * made.bytes_per_token


@pytest.mark.requirement(21, 34)
@pytest.mark.parametrize(("seed", "codec"), [(1, "bf16"), (2, "bf16"), (3, "int8/int4")])
def test_bit_equality_under_load(seed: int, codec: str) -> None:
    """With a tail, too: forks, preemptions and prompts that share begin with whole tiles."""
    rng = random.Random(seed)
    cache = dict(block_size=16, cache_bytes=blocks_of_16(20))
    if codecs_of(codec).tail:
        cache = dict(block_size=32, cache_bytes=_tight(codec))
    engine = engine_of(PROGRAM, max_seqs=8, max_batch_tokens=48, chunk_while_decoding=24, codec=codec, **cache)
    waiting = sorted(plans(rng), key=lambda plan: plan[0])
    requests: list[tuple[Request, list[int], SamplingParams]] = []
    ends: dict[int, Request] = {}
    log: dict = {}
    cancels, step = 0, 0
    while waiting or engine.busy:
        while waiting and waiting[0][0] <= step:
            _, prompt, params, cancelled = waiting.pop(0)
            requests.append((engine.add(prompt, params), prompt, params))
            if cancelled:
                ends.setdefault(step + cancelled, requests[-1][0])
        if (request := ends.pop(step, None)) and not request.done:
            engine.cancel(request)
            cancels += 1
        record(engine.step(), log)
        engine.cache.check()
        step += 1
        assert step < 5000
    finish(engine)
    completed = 0
    for request, prompt, params in requests:
        for sample in request.samples:
            if sample.finish_reason != "cancelled":
                assert log[(id(request), sample.index)] == alone(prompt, params, codec)[sample.index]
                completed += 1
    hits = sum(bool(request.adoption and request.adoption.reused) for request, _, _ in requests)
    assert engine.scheduler.n_preemptions > 10
    assert hits > (1 if codecs_of(codec).tail else 10)
    assert cancels > 10
    assert completed > 40
    usage = engine.cache.usage()
    assert usage.sequences == usage.blocks_used == 0
