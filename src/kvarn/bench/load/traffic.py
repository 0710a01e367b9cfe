"""Traffic: the requests and their arrival times. The same seed gives the same requests and times."""

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvarn.bench.load.client import Outcome, Target
from kvarn.errors import KvarnError

IDS = range(64, 256)  # ordinary tokens in every vocabulary that kvarn supports
WORDS = ("time", "year", "people", "way", "day", "thing", "life", "child", "world", "school", "state", "group")


@dataclass(frozen=True, slots=True)
class Traffic:
    requests: int
    rate: float | None  # mean arrivals per second, at random times; None: as fast as `concurrency` allows
    concurrency: int | None  # most requests at the same time; None: no limit
    input_len: int
    output_len: int
    shared_prefix_len: int = 0
    seed: int = 0
    as_text: bool = False  # words instead of token ids, for servers that do not accept ids
    ignore_eos: bool = True  # not in OpenAI's API; without it answers may be shorter

    def __post_init__(self) -> None:
        for name in ("requests", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise KvarnError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.shared_prefix_len <= self.input_len:
            raise KvarnError(f"a shared prefix of {self.shared_prefix_len} does not fit an input of {self.input_len}")
        if self.rate is not None and not 0 < self.rate < 1e6:
            raise KvarnError(f"a rate of {self.rate} per second; it must be above 0")
        if self.concurrency is not None and self.concurrency < 1:
            raise KvarnError(f"a concurrency of {self.concurrency}; it must be at least 1")

    def bodies(self, model: str) -> Iterator[dict[str, Any]]:
        rng = random.Random(self.seed)
        choose: Callable[[], Any] = (lambda: rng.choice(WORDS)) if self.as_text else (lambda: rng.choice(IDS))
        shared = [choose() for _ in range(self.shared_prefix_len)]
        for _ in range(self.requests):
            prompt = shared + [choose() for _ in range(self.input_len - self.shared_prefix_len)]
            body: dict[str, Any] = {
                "model": model,
                "prompt": " ".join(prompt) if self.as_text else prompt,
                "max_tokens": self.output_len,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            if self.ignore_eos:
                body["ignore_eos"] = True
            yield body

    def pauses(self) -> Iterator[float]:
        """Seconds before each arrival, as in a Poisson process."""
        rng = random.Random(self.seed + 1)
        while True:
            yield 0.0 if self.rate is None else rng.expovariate(self.rate)

    async def play(self, target: Target, model: str, done: Callable[[Outcome], None]) -> list[Outcome]:
        gate = asyncio.Semaphore(self.concurrency or self.requests)

        async def one(body: dict[str, Any]) -> Outcome:
            async with gate:
                outcome = await target.ask(body)
            done(outcome)
            return outcome

        tasks = []
        for body, pause in zip(self.bodies(model), self.pauses(), strict=False):
            if pause:
                await asyncio.sleep(pause)
            tasks.append(asyncio.ensure_future(one(body)))
        return list(await asyncio.gather(*tasks))
