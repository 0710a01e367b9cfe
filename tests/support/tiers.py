"""Engines with tiers: answers with their log-probabilities, and folders that misbehave."""

import threading
from collections.abc import Sequence
from pathlib import Path

from kvarn import LLM, SamplingParams
from kvarn.engine.engine import Engine
from kvarn.engine.request import Request
from kvarn.lasting.block_file import Name
from kvarn.lasting.folder import Folder

SPACE = b"s" * 16
Answer = list[tuple]  # token, log-probability, alternatives


def ask(engine: Engine, *prompts: Sequence[int], salt: bytes = b"", priority: int = 0, n: int = 6) -> list[Answer]:
    return [answer for _, answer in asked(engine, *prompts, salt=salt, priority=priority, n=n)]


def asked(
    engine: Engine, *prompts: Sequence[int], salt: bytes = b"", priority: int = 0, n: int = 6
) -> list[tuple[Request, Answer]]:
    """All prompts at once; each request with its greedy answer."""
    params = SamplingParams(max_tokens=n, logprobs=2, ignore_eos=True)
    requests = [engine.add(list(prompt), params, salt=salt, priority=priority) for prompt in prompts]
    found: dict[int, Answer] = {request.id: [] for request in requests}
    for _ in range(20_000):
        if not engine.busy:
            engine.cache.check()
            return [(request, found[request.id]) for request in requests]
        for event in engine.step():
            if event.sample.request.id in found:
                sampled = event.sampled
                found[event.sample.request.id].append((sampled.token, sampled.logprob, sampled.top))
    raise AssertionError("the engine does not come to an end")


def reads(llm: LLM) -> dict[str, int]:
    return {tier: count.reads for tier, count in llm.engine.tiers.counts().items()}


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kvb"))


class Hanging(Folder):
    """A folder whose disk never answers."""

    def __init__(self, root: Path, limit: int, puts: bool = True, gets: bool = True) -> None:
        super().__init__(root, limit, SPACE)
        self._puts, self._gets = puts, gets
        self._for_ever = threading.Event()  # never set
        self.began = threading.Event()

    def put(self, name: Name, tokens: Sequence[int], cells: bytes, stamp: int | None = None) -> None:
        if self._puts:
            self.began.set()
            self._for_ever.wait()
        super().put(name, tokens, cells, stamp)

    def get(self, name: Name, tokens: Sequence[int]) -> bytes | None:
        if self._gets:
            self.began.set()
            self._for_ever.wait()
        return super().get(name, tokens)
