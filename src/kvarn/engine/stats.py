"""The counters of the engine. Non-goal: how they are shown."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvarn.engine.request import Request, Sample
from kvarn.engine.scheduler import Work


@dataclass(slots=True)
class EngineStats:
    steps: int = 0
    prompt_tokens: int = 0  # of requests whose prompt was computed
    cached_tokens: int = 0  # those of prompt_tokens that were reused from the cache
    generated_tokens: int = 0
    sampled: Counter[str] = field(default_factory=Counter)  # tokens, by where: `device`, or why the host did
    prefill_seconds: float = 0.0  # time of steps that computed prompt tokens, or recomputed tokens after a preemption
    prefill_tokens: int = 0
    prefill_depth: int = 0  # tokens that their sequences had before the step, summed over steps
    prefill_steps: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    decode_depth: int = 0
    decode_steps: int = 0
    steps_ahead: int = 0  # decode steps that were launched before the tokens of the last one were read
    peak_blocks: int = 0  # most blocks in use at once
    finished: int = 0  # requests that ended, for any reason
    request_seconds: float = 0.0  # sum of their times from arrival to end

    def count_prompt(self, request: Request) -> None:
        self.prompt_tokens += len(request.prompt)
        self.cached_tokens += request.adoption.reused if request.adoption else 0

    def account(self, work: Sequence[Work], decodes: bool, seconds: float) -> None:
        """Count a step, and charge its time to the requests."""
        tokens = sum(each.n for each in work)
        depth = sum(each.sample.computed for each in work) - tokens
        self.steps += 1
        if decodes:
            self.decode_seconds += seconds
            self.decode_tokens += tokens
            self.decode_depth += depth
            self.decode_steps += 1
        else:
            self.prefill_seconds += seconds
            self.prefill_tokens += tokens
            self.prefill_depth += depth
            self.prefill_steps += 1
        for each in work:
            sample = each.sample
            if decodes and sample.furthest < sample.computed:
                sample.furthest = sample.computed  # neither a part of the prompt nor computed before
            else:
                _charge(sample, each.n, seconds / tokens)


def _charge(sample: Sample, n: int, seconds_per_token: float) -> None:
    """Add the sample's share of a step's time to its prompt's time and to its recomputation after preemptions."""
    timing, end = sample.request.timing, sample.computed
    repeated = max(min(sample.furthest, end) - (end - n), 0)
    timing.recomputed_tokens += repeated
    timing.recomputed_seconds += seconds_per_token * repeated
    start = end - n + repeated
    timing.prefill_seconds += seconds_per_token * max(min(end, len(sample.request.prompt)) - start, 0)
    sample.furthest = max(sample.furthest, end)
