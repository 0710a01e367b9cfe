"""The settings of an engine."""

from dataclasses import dataclass

from kvarn.errors import KvarnError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    max_batch_tokens: int = 512  # most tokens of a step
    chunk_while_decoding: int | None = None  # most prompt tokens of a step that also decodes; None: no limit
    max_waiting: int | None = None  # most requests in the queue; None: no limit

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "chunk_while_decoding", "max_waiting"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise KvarnError(f"{name} is {value}; it must be at least 1")
