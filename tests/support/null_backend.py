"""A backend that computes nothing: its memory records steps, its program always predicts the same token.

What the engine and the server promise without looking at content holds on it, too: tests marked `any_backend` run
twice. It is also the shortest answer to "what must a backend have?".
"""

from collections.abc import Sequence

import numpy as np

from kvarn.backends.base import Counters, Layers, Span
from kvarn.backends.host import HostLogits
from kvarn.cache.plan import Plan
from kvarn.cache.step import Step
from kvarn.errors import KvarnError
from kvarn.models.config import ModelConfig

TOKEN = 7


class NullMemory:
    def __init__(self) -> None:
        self.counters = Counters()
        self.steps: list[Step] = []

    def apply(self, step: Step) -> None:
        self.steps.append(step)

    def read_block(self, group: int, block: int) -> bytes:
        return b""

    def write_block(self, group: int, block: int, data: bytes) -> None:
        pass


class NullProgram:
    nbytes = workspace = 0

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def run(self, memory: NullMemory, step: Step, tokens: Sequence[int], wanted: Sequence[int]) -> HostLogits:
        assert len(tokens) == len(step.positions) == sum(step.n_new)
        memory.steps.append(step)
        logits = np.zeros((len(wanted), self.config.vocab_size), np.float32)
        logits[:, TOKEN] = 1
        return HostLogits(logits)

    def hidden(self, memory: NullMemory, step: Step, tokens: Sequence[int], wanted: Sequence[int]) -> np.ndarray:
        memory.steps.append(step)
        return np.zeros((len(wanted), self.config.hidden), np.float32)

    def trace(self, on: bool) -> None:
        raise KvarnError("the null backend takes no time")

    def timings(self) -> list[Span]:
        return []


class Null:
    name, default_layout, memory_bytes = "null", "token-major", None
    ahead = 0

    def room(self) -> None:
        return None

    def memory(self, plan: Plan) -> NullMemory:
        return NullMemory()

    def layers(self, plan: Plan) -> Layers:
        raise KvarnError("the null backend has no layers")

    def load(self, checkpoint, graph, max_tokens, progress) -> NullProgram:
        return NullProgram(checkpoint.config)

    def facts(self) -> dict[str, str]:
        return {"name": self.name}
