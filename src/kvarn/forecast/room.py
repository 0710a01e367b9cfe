"""What would fit instead: the largest context, the largest batch, and the cheapest change that fits.

Sizes come from the same functions as the forecast, for other settings. More tokens or sequences never need
less memory, so the largest that fits is found by halving.
Cheap is what changes answers least: fewer sequences at once change none; int8 cells round keys and values, and int4
cells round them more; a shorter context shortens conversations; sinks forget what left the window.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvarn.cache.plan import MOST_SEQUENCES, CacheConfig
from kvarn.cache.spec import align
from kvarn.errors import KvarnError

STEP = 32  # contexts are multiples of it
SINKS = 2048  # tokens that the sinks strategy sees
NARROW = ("int8", "int4")  # small cells, the better ones first

Total = Callable[[CacheConfig], int]  # bytes of everything with such a cache


@dataclass(frozen=True, slots=True)
class Option:
    """Settings that fit."""

    config: CacheConfig
    total: int  # bytes of everything

    def changes(self, asked: CacheConfig) -> tuple[str, ...]:
        """The flags that make these settings of those that were asked for."""
        new, flags = self.config, []
        if new.strategy != asked.strategy:
            flags += [f"--cache {new.strategy}", f"-c {new.window or new.context}"]
        elif new.context != asked.context:
            flags.append(f"-c {new.context}")
        if new.max_seqs != asked.max_seqs:
            flags.append(f"-np {new.max_seqs}")
        if new.codec != asked.codec:
            flags.append(f"--cache-type {new.codec}")
        return tuple(flags)


@dataclass(frozen=True, slots=True)
class Room:
    """A budget of bytes for one model; `most` is the longest context that it was trained for."""

    budget: int
    total: Total
    most: int

    def options(self, config: CacheConfig) -> list[Option]:
        """What to change so that it fits, cheapest first; or what else would fit, if it does already."""
        fits = self.fits(config)
        found = self._more(config) if fits else self._less(config)
        by_changes: dict[tuple[str, ...], Option] = {}
        for option in found:
            if option is not None:
                by_changes.setdefault(option.changes(config), option)
        return list(by_changes.values())

    def fits(self, config: CacheConfig) -> bool:
        try:
            return self.total(config) <= self.budget
        except KvarnError:  # these settings do not go together
            return False

    def _more(self, config: CacheConfig) -> list[Option | None]:
        if config.window is not None:  # its context costs nothing
            return [self._widest(config, config.max_seqs)]
        longer = self._longest(config, config.context)
        reached = config.context if longer is None else longer.config.context
        narrow = [self._longest(each, reached) for each in _narrowed(config)[:1]]
        return [longer, self._widest(config, config.max_seqs), *narrow]

    def _less(self, config: CacheConfig) -> list[Option | None]:
        alone = replace(config, max_seqs=1)
        options = [
            self._widest(config, 0),
            next(filter(None, map(self._option, _narrowed(config))), None),
            self._longest(config, 0),
            self._longest(alone, 0) if config.max_seqs > 1 else None,
            *(self._longest(each, 0) for each in _narrowed(alone)[:1]),
        ]
        if not any(option is not None and option.config.context >= config.context for option in options):
            options.append(self._option(replace(config, strategy="sinks", context=self.most, window=self.sinks)))
        return options

    @property
    def sinks(self) -> int:
        """Tokens that the sinks strategy would see."""
        return min(SINKS, self.most)

    def _longest(self, config: CacheConfig, above: int) -> Option | None:
        """The longest context that fits, if it is more than `above`."""
        steps = align(self.most, STEP) // STEP
        n = _largest(steps, lambda n: self.fits(self._with_context(config, n)))
        chosen = self._with_context(config, n)
        return self._option(chosen) if n and chosen.context > above else None

    def _with_context(self, config: CacheConfig, steps: int) -> CacheConfig:
        context = max(min(steps * STEP, self.most), 1)
        return replace(config, context=context, max_chunk=min(config.max_chunk, context))

    def _widest(self, config: CacheConfig, above: int) -> Option | None:
        """The most sequences that fit, if they are more than `above`."""
        n = _largest(MOST_SEQUENCES, lambda n: self.fits(replace(config, max_seqs=max(n, 1))))
        return self._option(replace(config, max_seqs=n)) if n > above else None

    def _option(self, config: CacheConfig) -> Option | None:
        return Option(config, self.total(config)) if self.fits(config) else None


def _narrowed(config: CacheConfig) -> list[CacheConfig]:
    """With smaller cells, the better ones first."""
    after = NARROW.index(config.codec) + 1 if config.codec in NARROW else 0
    return [replace(config, codec=codec) for codec in NARROW[after:]]


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest n up to `most` for which it holds; 0 if there is none. If it holds for n, it holds for all below."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
