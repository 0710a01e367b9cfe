"""Adversarial schedules: every answer has the tokens and log-probabilities that it has alone.

    python tests/attack_schedules.py --seed 1 --cases 150

A case is a random model, cache and engine: requests with several samples, priorities, salts and conversations are
added and cancelled at random moments, in caches that are too small for them. In some cases steps fail on one token.
Where prefixes are shared, evicted blocks often go to host memory, to a folder, or both, and come back from there.
"""

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from support import cases, tiny_gguf
from support.cases import Limits

from kvarn import LLM, KvarnError, SamplingParams
from kvarn.cache.codec import CODECS
from kvarn.cache.layouts import LAYOUTS
from kvarn.cache.strategy import STRATEGIES
from kvarn.engine.request import Request
from kvarn.lasting import tiers

POISON = 33
tiers.GUESS = 1e-3  # tiny models compute faster than a disk reads: read all the same
tiers.BlockTiers.computed = lambda *_: None  # type: ignore[assignment,method-assign]
FOLDER = tempfile.TemporaryDirectory()  # of the process that forks the others


def model(variant: str) -> Path:
    path = Path(FOLDER.name) / f"{variant}.gguf"
    return path if path.exists() else tiny_gguf.write(path, variant, tiny_gguf.CHAT)


def settings_of(rng: random.Random) -> dict[str, Any]:
    """Of the cache; the answers depend on them, because of windows and codecs."""
    cache = "paged" if rng.random() < 0.4 else rng.choice(list(STRATEGIES))
    chosen: dict[str, Any] = {
        "cache": cache,
        "cache_type": "/".join(rng.choices(list(CODECS), k=rng.choice([1, 2]))),
        "context": 128,
    }
    if cache in ("ring", "sliding", "sinks") and rng.random() < 0.8:
        chosen["window"] = rng.choice([4, 16, 33])
        if cache == "sinks" and rng.random() < 0.8:
            chosen["pinned"] = rng.choice([1, 4])
    return chosen


def attempt(seed: int, number: int) -> str:
    rng = random.Random(f"{seed}/{number}")
    path, chosen = model(rng.choice(tiny_gguf.VARIANTS)), settings_of(rng)
    engine = {
        "max_seqs": rng.randrange(2, 7),
        "max_batch_tokens": rng.choice([8, 13, 32, 64]),
        "threads": rng.randrange(1, 4),
        "cache_layout": rng.choice([None, None, *LAYOUTS]),
    }
    if chosen["cache"] == "paged":
        engine |= {"block_size": rng.choice([None, 16, 32])}
    if chosen["cache"] in ("paged", "sliding"):
        engine |= tiers_of(rng)
    try:
        llm = LLM(path, **chosen, **engine)
        if chosen["cache"] == "paged":
            least = llm.cache.plan.nbytes // llm.cache.plan.n_blocks
            llm = LLM(path, **chosen, **engine, cache_bytes=least * rng.randrange(5, 14))
    except KvarnError:
        return "refused"
    poisoned = rng.random() < 0.25
    if poisoned:
        poison(llm)
    made, log = play(llm, rng)
    usage = llm.cache.usage()
    assert not (usage.sequences - len(llm.engine.scheduler.parked)), usage
    llm.cache.check()
    llm.close()
    compare(LLM(path, **chosen, max_seqs=4, max_batch_tokens=64), made, log, rng, poisoned)
    if any(count.reads for count in llm.engine.tiers.counts().values()):
        return "from tiers"
    return "poisoned" if poisoned else "preempted" if llm.engine.scheduler.n_preemptions else "equal"


def tiers_of(rng: random.Random) -> dict[str, Any]:
    """A folder is shared by the cases of a process, so it also has blocks of other models and settings."""
    chosen: dict[str, Any] = {}
    if rng.random() < 0.5:
        chosen["host_cache"] = rng.choice([3_000, 30_000, 10**8])
    if rng.random() < 0.5:
        chosen["disk_cache"] = f"{FOLDER.name}/blocks:{rng.choice(['40K', '1M', '1G'])}"
    return chosen


def poison(llm: LLM) -> None:
    run = llm.program.run

    def fail(memory: Any, step: Any, tokens: Any, wanted: Any) -> Any:
        if POISON in tokens:
            raise RuntimeError("poison")
        return run(memory, step, tokens, wanted)

    llm.engine.program.run = fail  # type: ignore[method-assign]


def play(llm: LLM, rng: random.Random) -> tuple[list[Request], dict[tuple[int, int], list[tuple]]]:
    engine, log, made = llm.engine, {}, []
    starts = [[rng.randrange(250) for _ in range(60)] for _ in range(3)]
    left = rng.randrange(6, 16)
    for _ in range(3000):
        if left and rng.random() < 0.3:
            left -= 1
            prompt = [
                *rng.choice(starts)[: rng.randrange(61)],
                *(rng.randrange(250) for _ in range(rng.randrange(1, 20))),
            ]
            try:
                made.append(add(llm, rng, prompt))
            except KvarnError:  # it is longer than this small cache
                continue
        if made and rng.random() < 0.02:
            engine.cancel(rng.choice(made))
        if not left and not engine.busy:
            break
        try:
            for event in engine.step():
                key = (event.sample.request.id, event.sample.index)
                log.setdefault(key, []).append((event.sampled.token, event.sampled.logprob, event.sampled.top))
        except RuntimeError as error:
            engine.isolate(error)
        if rng.random() < 0.1:
            llm.cache.check()
    assert not engine.busy, "it does not come to an end"
    return made, log


def add(llm: LLM, rng: random.Random, prompt: list[int]) -> Request:
    params = SamplingParams(
        max_tokens=rng.randrange(1, 20),
        temperature=rng.choice([0.0, 0.0, 1.3]),
        seed=rng.randrange(100),
        n=rng.choice([1, 1, 1, 2, 3]),
        logprobs=2,
        ignore_eos=True,
        frequency_penalty=rng.choice([0.0, 0.5]),
        logit_bias={POISON: -1000.0},
    )
    return llm.engine.add(
        prompt,
        params,
        salt=rng.choice([b"", b"a"]),
        conversation=rng.choice([None, None, "c", "d"]),
        priority=rng.choice([0, 0, 3]),
    )


def compare(alone: LLM, made: list[Request], log: dict, rng: random.Random, poisoned: bool) -> None:
    for request in rng.sample(made, min(len(made), 6)):
        guilty = poisoned and POISON in request.prompt
        assert guilty or request.error is None, f"an innocent request failed: {request.error!r}"
        if request.error is not None or any(s.finish_reason == "cancelled" for s in request.samples):
            continue
        again, expected = alone.engine.add(request.prompt, request.params), {}
        while alone.engine.busy:
            for event in alone.engine.step():
                sampled = event.sampled
                expected.setdefault(event.sample.index, []).append((sampled.token, sampled.logprob, sampled.top))
        for sample in again.samples:
            got = log[request.id, sample.index]
            assert got == expected[sample.index][: len(got)], "another answer than alone"
            assert len(got) == len(expected[sample.index]) or request.samples[sample.index].finish_reason == "length"


def main(arguments: list[str] | None = None) -> int:
    for variant in tiny_gguf.VARIANTS:
        model(variant)
    return cases.main("schedules", attempt, Limits(batch=25, seconds=120), 150, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
