"""A server with OpenAI's API as the subject of a benchmark. Prompts are token ids; the client measures time.

    pp    requests for one token each. The last N tokens of a prompt are new. Tokens that the server
          reports as cached are not counted.
    tg    streams. Only tokens that arrive while all sequences generate are counted.

The server's prefix cache holds the first D tokens (the depth). If a server has no prefix cache, pp
computes and counts these tokens, too.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from kvarn.bench.case import GENERATE, Case, Reading
from kvarn.bench.http import parse_address, request, request_json
from kvarn.bench.ids import RandomIds
from kvarn.errors import KvarnError

TIMEOUT = 600.0  # seconds


class Server:
    def __init__(self, url: str, vocab_size: int, longest: int) -> None:
        self.url, self.address = url, parse_address(url)
        self.vocab_size, self.longest = vocab_size, longest
        self.ids = RandomIds(vocab_size, longest)
        self.repetition = 0
        self.model = self.name()

    def prepare(self, case: Case) -> None:
        self.measure(Case(case.kind, min(case.n, 8), case.depth, case.batch))

    def measure(self, case: Case) -> Reading:
        self.repetition += 1
        with ThreadPoolExecutor(case.batch) as pool:
            return self.generate(case, pool) if case.kind == GENERATE else self.prompt(case, pool)

    def describe(self) -> dict[str, object]:
        return {"engine": self.url, "setting": self.model}

    def close(self) -> None:
        """Nothing is held between requests."""

    def prompt(self, case: Case, pool: ThreadPoolExecutor) -> Reading:
        fresh = RandomIds(self.vocab_size, case.n, seed=1000 + self.repetition)
        prompts = [self.ids(i, case.depth) + fresh(i, case.n) for i in range(case.batch)]
        start = time.perf_counter()
        computed = list(pool.map(self.computed_tokens, prompts))
        return Reading(sum(computed), time.perf_counter() - start)

    def computed_tokens(self, prompt: list[int]) -> int:
        answer = json.loads(b"".join(self.post(prompt, 1, False)))
        details = answer.get("usage", {}).get("prompt_tokens_details") or {}
        return len(prompt) - int(details.get("cached_tokens") or 0)

    def generate(self, case: Case, pool: ThreadPoolExecutor) -> Reading:
        prompts = [self.ids(i, max(case.depth, 1)) for i in range(case.batch)]
        arrivals = list(pool.map(lambda prompt: self.arrivals(prompt, case.n + 1), prompts))
        start, stop = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
        if stop <= start:
            raise KvarnError(f"{self.url} does not generate {case.batch} sequences at once: lower -b or raise -n")
        return Reading(sum(start < at <= stop for times in arrivals for at in times), stop - start)

    def arrivals(self, prompt: list[int], n: int) -> list[float]:
        """The arrival time of each token."""
        times = []
        for line in self.post(prompt, n, True):
            if line.startswith(b"data:") and b"[DONE]" not in line and json.loads(line[5:]).get("choices"):
                times.append(time.perf_counter())
        if len(times) < 2:
            raise KvarnError(f"{self.url} streamed {len(times)} of {n} tokens")
        return times

    def post(self, prompt: list[int], n: int, stream: bool) -> Iterator[bytes]:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": n,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        return request(self.address, "POST", "/v1/completions", body, timeout=TIMEOUT)

    def name(self) -> str:
        models = request_json(self.address, "GET", "/v1/models").get("data") or [{}]
        return str(models[0].get("id", "unknown"))
