"""Requests under pressure: prefix hits, preemptions, forks and mixed batches, each with the answer it has alone."""

from collections.abc import Sequence
from typing import Any

from gpu.support.models import Loaded, text

from kvarn.cache.codec import codecs_of
from kvarn.cache.plan import SMALLEST_BLOCK, Plan
from kvarn.engine.engine import Engine
from kvarn.engine.params import SamplingParams
from kvarn.engine.request import Request
from proof.report import Check
from proof.site import Site

Asked = tuple[list[int], SamplingParams]
Answer = dict[int, list[tuple[Any, ...]]]  # of each sample: tokens, log-probabilities and alternatives
MOST_STEPS = 10_000
MOST_SEQS = 4


def under_pressure(site: Site, check: Check, loaded: Loaded, codec: str) -> None:
    n_requests, longest, answer = site.pick((16, 300, 24), (8, 120, 20), (6, 60, 8), (4, 40, 5))
    asked = requests(site, n_requests, longest, answer)
    context = longest + answer + 16
    batch = site.pick(96, 48, 32)
    size = max(codecs_of(codec).tail, SMALLEST_BLOCK)
    budget = tight(loaded.cache(context, codec=codec, block_size=size, max_chunk=batch)[1].plan)
    engine = loaded.engine(context, batch, codec=codec, block_size=size, max_seqs=MOST_SEQS, cache_bytes=budget)
    found, served = answers(engine, asked)
    alone = loaded.engine(context, context, codec=codec, max_seqs=2, strategy="contiguous")
    for i, each in enumerate(asked):
        check.case(found[i] == answers(alone, [each])[0][0], f"request {i} of {len(asked)}")
    hits = sum(request.adoption is not None and request.adoption.reused > 0 for request in served)
    check.number("prefix hits", hits)
    check.number("preemptions", engine.scheduler.n_preemptions)
    check.case(hits > 0, "no request found a prefix")
    check.case(engine.scheduler.n_preemptions > 0, "no sequence was preempted")


def tight(one: Plan) -> int:
    """Bytes for the windows of all sequences, and for little more than one full sequence. `one` is the plan of one."""
    total = 0.0
    for group in one.groups:
        bounded = group.blocks_per_sequence < group.config.context_blocks
        nbytes = len(group.layers) * group.parts.block_bytes * group.config.n_blocks
        total += nbytes * (MOST_SEQS if bounded else 1.4) + MOST_SEQS * group.tail_bytes
    return int(total)


def requests(site: Site, n: int, longest: int, answer: int) -> list[Asked]:
    """Prompts that begin as others do. Every third has two samples that are drawn."""
    random = site.random(41)
    starts = [text(longest, seed) for seed in (50, 51)]
    asked = []
    for i in range(n):
        prompt = [*starts[i % 2][: random.integers(longest // 2, longest - 5)], *text(5, 60 + i)]
        drawn: dict[str, Any] = dict(temperature=0.9, seed=i, n=2) if i % 3 == 1 else {}
        asked.append((prompt, SamplingParams(max_tokens=answer, logprobs=2, ignore_eos=True, **drawn)))
    return asked


def answers(engine: Engine, asked: Sequence[Asked]) -> tuple[list[Answer], list[Request]]:
    served = [engine.add(prompt, params) for prompt, params in asked]
    found: dict[int, Answer] = {id(request): {} for request in served}
    steps = 0
    while engine.busy:
        for event in engine.step():
            sampled, sample = event.sampled, event.sample
            log = found[id(sample.request)].setdefault(sample.index, [])
            log.append((sampled.token, sampled.logprob, sampled.top))
        steps += 1
        if steps > MOST_STEPS:
            raise AssertionError("the engine does not come to an end")
    engine.cache.check()
    return [found[id(request)] for request in served], served
