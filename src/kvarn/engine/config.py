"""The settings of an engine."""

from dataclasses import dataclass

from kvarn.errors import KvarnError

MOST = 2**31 - 1  # of tokens or requests


@dataclass(frozen=True, slots=True)
class EngineConfig:
    max_batch_tokens: int = 512  # most tokens of a step
    chunk_while_decoding: int | None = None  # most prompt tokens of a step that also decodes; None: no limit
    max_waiting: int | None = None  # most requests in the queue; None: no limit

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "chunk_while_decoding", "max_waiting"):
            value = getattr(self, name)
            if value is None and name != "max_batch_tokens":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
                raise KvarnError(f"{name} is {value!r}; it must be a whole number, at least 1 and at most {MOST}")
