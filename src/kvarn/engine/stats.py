"""The counters of the engine. Non-goal: how they are shown."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineStats:
    steps: int = 0
    prompt_tokens: int = 0  # of requests whose prompt was computed
    cached_tokens: int = 0  # those of prompt_tokens that were reused from the cache
    generated_tokens: int = 0
    sampled: Counter[str] = field(default_factory=Counter)  # tokens, by where: `device`, or why the host did
    prefill_seconds: float = 0.0  # time of steps that computed prompt tokens, or recomputed tokens after a preemption
    prefill_tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    steps_ahead: int = 0  # decode steps that were launched before the tokens of the last one were read
    peak_blocks: int = 0  # most blocks in use at once
    finished: int = 0  # requests that ended, for any reason
    request_seconds: float = 0.0  # sum of their times from arrival to end
