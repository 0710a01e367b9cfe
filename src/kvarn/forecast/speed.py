"""Seconds of a step, of a prompt and of its first token: the work of the model times the rates of the machine.

    decode    bytes of weights and cells that the step reads, each at the rate of its kernel; the products that are
              too small to be only reading; the engine's own step
    prompt    multiplications of products and attention, in chunks of the step's size; a chunk too short to be bound
              by arithmetic takes at least the time to read the weights

Non-goals: rates (machine.py); sequences that wait for each other.
"""

from dataclasses import dataclass

from kvarn.cache.plan import Plan
from kvarn.cache.spec import LayerSpec
from kvarn.forecast import rates as figures
from kvarn.forecast.rates import Rates
from kvarn.forecast.work import Work


@dataclass(frozen=True, slots=True)
class Speed:
    work: Work
    plan: Plan
    rates: Rates

    def decode(self, depth: int, batch: int = 1) -> float:
        """Seconds of a step in which each of `batch` sequences has `depth` tokens and computes one more."""
        return self._products(batch, batch) + batch * self._cells(depth) + self._step(batch)

    def prompt(self, n_tokens: int, depth: int = 0) -> float:
        """Seconds until all tokens of a prompt are computed, and its first token is drawn."""
        seconds, start, end = 0.0, depth, depth + n_tokens
        while start < end:
            stop = min(start + self.plan.max_chunk, end)
            last = stop == end
            seconds += self._products(stop - start, int(last)) + self._step(int(last))
            seconds += self._cells(start) if stop - start == 1 else self._attention(start, stop)
            start = stop
        return seconds

    def bytes_read(self, depth: int) -> int:
        """Of one decode step of one sequence."""
        cells = sum(g.bytes_per_token * g.config.spec.seen(depth, depth + 1) for g in self.plan.groups)
        return self.work.weight_bytes + cells

    def _products(self, tokens: int, wanted: int) -> float:
        seconds = self.work.n_products * self.rates[figures.SMALL]
        for kind, amount in self.work.products.items():
            multiplications = amount.per_token * tokens + amount.per_wanted * wanted
            reading = amount.nbytes * self.rates[figures.read(kind)]
            seconds += reading if tokens == 1 else max(reading, multiplications * self.rates[figures.multiply(kind)])
        return seconds

    def _cells(self, depth: int) -> float:
        seconds = 0.0
        for group in self.plan.groups:
            spec = group.config.spec
            shape = figures.shape_of(self.plan, spec)
            read = group.bytes_per_token * spec.seen(depth, depth + 1)
            seconds += len(group.layers) * self.rates[figures.small_attention(shape)]
            seconds += read * self.rates[figures.read_cells(shape)]
        return seconds

    def _attention(self, start: int, stop: int) -> float:
        """Of the new tokens from `start` to before `stop`."""
        seconds = 0.0
        for group in self.plan.groups:
            spec = group.config.spec
            pairs = seen_by_all(spec, start, stop) * spec.n_heads * (spec.k_dim + spec.v_dim) * len(group.layers)
            seconds += pairs * self.rates[figures.attend(figures.shape_of(self.plan, spec))]
        return seconds

    def _step(self, drawn: int) -> float:
        return self.rates[figures.STEP] + drawn * self.work.vocabulary * self.rates[figures.LOGIT]


def seen_by_all(spec: LayerSpec, start: int, stop: int) -> int:
    """Pairs of a query in [start, stop) and a key that it sees."""
    full = stop if spec.window is None else min(max(spec.window, start), stop)  # before it, queries see everything
    before = (full + start + 1) * (full - start) // 2
    return before + sum(spec.seen(q, q + 1) for q in range(full, stop))
