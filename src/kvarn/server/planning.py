"""`GET /kvarn/plan`: what was to be expected of this server, what is true so far, and the error.

Memory compares the forecast with what the process holds. Speed compares the time of all steps so far with the
forecast for the mean step: its tokens, and the tokens that their sequences had. Figures of this machine that are
missing are measured when the engine is idle; until then there is no speed. No texts are involved.

On a device, memory is that of the device, and what weights take is compared. Its speed is what `kvarn plan` measured
there before: a server has no room on it for trials.
"""

from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np

from kvarn.backends.cpu import Cpu
from kvarn.backends.cpu.program import CpuProgram
from kvarn.backends.cuda.limits import weight_bytes
from kvarn.forecast.device import kept_speed
from kvarn.forecast.forecast import at_depth, usual_depths
from kvarn.forecast.machine import kept_rates, rates_of
from kvarn.forecast.memory import Beside, vocabulary_bytes
from kvarn.forecast.outlined import Outlined
from kvarn.forecast.rates import Rates
from kvarn.forecast.report import cache_json, depth_json, memory_json, pair, seconds_json, sizes_json
from kvarn.forecast.speed import Speed
from kvarn.forecast.truth import held_bytes
from kvarn.lasting.fetch import HOST
from kvarn.llm import LLM
from kvarn.loading.checkpoint import open_checkpoint
from kvarn.server.refusal import Refusal

Json = dict[str, Any]
Foreseen = Callable[[int, int], float | None]


class Planning:
    """`process`: bytes that this process held before it had a model; None: nobody looked. `host_cache`: its limit."""

    def __init__(self, llm: LLM, process: int | None = None, host_cache: int | None = None) -> None:
        self._llm, self._process, self._host_cache = llm, process, host_cache or 0
        self._rates: Rates | None = None
        self._lock = Lock()  # one measurement at a time

    def facts(self) -> Json:
        """Takes some tenths of a second at the first call. From any thread."""
        program, backend = self._llm.program, self._llm.backend
        if isinstance(program, CpuProgram) and isinstance(backend, Cpu):
            return self._on_host(program, backend)
        if backend.name == "cuda":
            return self._on_device()
        raise Refusal(404, f"the {backend.name} backend has no forecast: it is for the backends cpu and cuda")

    def _on_host(self, program: CpuProgram, backend: Cpu) -> Json:
        held, planned = self._held(), self._llm.cache.plan
        step = self._llm.engine.config.max_batch_tokens
        tokenizer = self._llm.tokenizer
        vocabulary = vocabulary_bytes(self._llm.config.vocab_size, tokenizer.is_sentence_piece)
        beside = Beside(self._process or 0, vocabulary, self._host_cache)
        model = Outlined.of_loaded(program, backend, step, beside)
        memory = model.memory(planned)
        known = held is not None and self._process is not None
        facts: Json = {
            "cache": cache_json(planned),
            "memory": memory_json(memory),
            "memory_bytes": pair(memory.total, held) if known and held else None,
            "depths": None,
            "decode": None,
            "prefill": None,
        }
        rates = self._known_rates(model)
        if rates is not None:
            speed = Speed(model.work, planned, rates)
            facts["depths"] = [depth_json(at_depth(speed, depth)) for depth in usual_depths(planned.context)]
            facts |= self._so_far(speed.decode, speed.prompt)
        return facts

    def _on_device(self) -> Json:
        llm, planned = self._llm, self._llm.cache.plan
        checkpoint = open_checkpoint(llm.path)
        weights, step = weight_bytes(checkpoint), llm.engine.config.max_batch_tokens
        known = kept_speed(llm.backend, checkpoint, llm.cache_config, step, usual_depths(planned.context))

        def decode(depth: int, batch: int) -> float | None:
            depths = sorted(known)
            if batch != 1 or len(depths) < 2 or not depths[0] <= depth <= depths[-1]:
                return None
            return float(np.interp(depth, depths, [known[each].step for each in depths]))

        facts: Json = {
            "cache": cache_json(planned),
            "device": sizes_json(weights, planned.nbytes),
            "weight_bytes": pair(weights, llm.program.nbytes),
            "depths": [seconds_json(depth, known[depth]) for depth in sorted(known)] or None,
            "decode": None,
            "prefill": None,
        }
        return facts | self._so_far(decode, lambda tokens, depth: None)

    def _held(self) -> int | None:
        """With a host cache that is full."""
        held, tiers = held_bytes(self._llm.memory), self._llm.engine.tiers.counts()
        return held + self._host_cache - tiers[HOST].nbytes if held is not None and HOST in tiers else held

    def _known_rates(self, model: Outlined) -> Rates | None:
        planned = self._llm.cache.plan
        with self._lock:
            if self._rates is None:
                self._rates = kept_rates(model.backend, model.work, planned)
            if self._rates is None and not self._llm.engine.busy:
                self._rates = rates_of(model.backend, model.work, planned)
            return self._rates

    def _so_far(self, decode: Foreseen, prompt: Foreseen) -> Json:
        """Seconds: `decode` of a step at a depth with a number of sequences, `prompt` of one with this many tokens at a
        depth."""
        stats, found = self._llm.engine.stats, Json()
        if stats.decode_steps:
            batch, depth = stats.decode_tokens / stats.decode_steps, stats.decode_depth / stats.decode_tokens
            expected = _rate(batch, decode(round(depth), max(round(batch), 1)))
            found["decode"] = {
                "steps": stats.decode_steps,
                "sequences": batch,
                "depth": depth,
                "tok_s": pair(expected, stats.decode_tokens / stats.decode_seconds),
            }
        if stats.prefill_steps:
            tokens, depth = stats.prefill_tokens / stats.prefill_steps, stats.prefill_depth / stats.prefill_steps
            expected = _rate(tokens, prompt(max(round(tokens), 1), round(depth)))
            found["prefill"] = {
                "steps": stats.prefill_steps,
                "tokens": tokens,
                "depth": depth,
                "tok_s": pair(expected, stats.prefill_tokens / stats.prefill_seconds),
            }
        return found


def _rate(tokens: float, seconds: float | None) -> float | None:
    return None if seconds is None else tokens / seconds
