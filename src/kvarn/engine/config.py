"""What an engine is told when it is made."""

from dataclasses import dataclass

from kvarn.errors import KvarnError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    max_batch_tokens: int = 512  # that a step computes at most
    chunk_while_decoding: int | None = None  # most prompt tokens of a step in which something decodes; None: any number
    max_waiting: int | None = None  # requests that may wait for room; None: any number

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "chunk_while_decoding", "max_waiting"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise KvarnError(f"{name} is {value}; it must be at least 1")
