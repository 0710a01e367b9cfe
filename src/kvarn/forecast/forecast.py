"""A forecast: what a model with these settings will need, how fast it will be, and what would fit instead.

From headers alone: the weights need not be on this machine. Speeds are those of this machine, also if the memory
of another one is given. Non-goals: words and tables (cli/plan_words.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvarn.cache.plan import CacheConfig, Plan
from kvarn.errors import KvarnError
from kvarn.forecast.memory import Memory
from kvarn.forecast.outlined import Outlined
from kvarn.forecast.rates import Rates
from kvarn.forecast.room import Option, Room
from kvarn.forecast.speed import Speed

PROMPT = 512  # tokens of the prompt whose speed is told, if the context has as many


@dataclass(frozen=True, slots=True)
class AtDepth:
    """One sequence with this many tokens in the cache."""

    depth: int
    decode_tok_s: float
    limit_tok_s: float  # the bytes of a step, read as fast as memory goes
    bytes_per_token: int
    first_token_s: float  # of a prompt of so many tokens


@dataclass(frozen=True, slots=True)
class Forecast:
    asked: CacheConfig
    plan: Plan
    memory: Memory
    budget: int | None  # bytes that there are; None: nobody knows
    options: tuple[Option, ...]  # what would fit
    speed: Speed
    depths: tuple[AtDepth, ...]
    prompt: int  # tokens
    prompt_tok_s: float

    @property
    def fits(self) -> bool | None:
        return None if self.budget is None else self.memory.total <= self.budget

    @property
    def batch_tok_s(self) -> float:
        """Of all sequences together, each with half of the context."""
        n = self.plan.max_seqs
        return n / self.speed.decode(self.plan.context // 2, n)


def foresee(
    model: Outlined, config: CacheConfig, rates: Rates, depths: Sequence[int] | None, budget: int | None
) -> Forecast:
    planned = model.plan(config)
    chosen = checked_depths(planned.context, depths)
    speed = Speed(model.work, planned, rates)
    prompt = max(min(PROMPT, planned.context - 1), 1)
    room = Room(budget or 0, lambda other: model.memory(model.plan(other)).total, model.config.context)
    return Forecast(
        asked=config,
        plan=planned,
        memory=model.memory(planned),
        budget=budget,
        options=() if budget is None else tuple(room.options(config)),
        speed=speed,
        depths=tuple(at_depth(speed, depth) for depth in chosen),
        prompt=prompt,
        prompt_tok_s=prompt / speed.prompt(prompt),
    )


def at_depth(speed: Speed, depth: int) -> AtDepth:
    read = speed.bytes_read(depth)
    return AtDepth(
        depth=depth,
        decode_tok_s=1 / speed.decode(depth),
        limit_tok_s=speed.rates.gb_s * 1e9 / read,
        bytes_per_token=read,
        first_token_s=speed.prompt(max(depth, 1)),
    )


def checked_depths(context: int, depths: Sequence[int] | None) -> tuple[int, ...]:
    """Those that were asked for, or the usual ones."""
    chosen = usual_depths(context) if depths is None else tuple(depths)
    for depth in chosen:
        if depth >= context:
            raise KvarnError(
                f"--depth {depth}: the context has {context:,} tokens, and one must be left to compute; "
                "raise -c, or lower --depth"
            )
    return chosen


def usual_depths(context: int) -> tuple[int, ...]:
    """An empty cache, a half full one, a full one."""
    return tuple(dict.fromkeys((0, context // 2, context - 1)))
