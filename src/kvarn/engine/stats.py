"""What the engine reports about itself. Numbers only: who shows them, and how, is not decided here."""

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    steps: int = 0
    prompt_tokens: int = 0  # of requests that were admitted
    cached_tokens: int = 0  # of those, reused from the cache
    generated_tokens: int = 0
    prefill_seconds: float = 0.0  # steps that computed something of a prompt, or what a preemption lost
    prefill_tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    peak_blocks: int = 0  # most blocks in use at once
    finished: int = 0  # requests that ended, however
    request_seconds: float = 0.0  # from their arrival to their end, all together
