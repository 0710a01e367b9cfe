"""Strategies: named combinations of a placement, a layout and a window. A strategy has no code of its own."""

from dataclasses import dataclass

from kvarn.errors import KvarnError

AUTO_CONTEXT = 2048  # from this context on, `auto` is always paged


@dataclass(frozen=True, slots=True)
class Strategy:
    name: str
    placement: str
    summary: str
    layout: str | None = None  # None: the user's choice, or the backend's default
    windowed: bool = False  # always use a window; if neither model nor user gives one, it is the context
    rolls: bool = False  # its memory depends on the window alone, so a sequence may go on after the context
    pinned: int = 0  # default of CacheConfig.pinned
    one_page: bool = False  # by default, one block holds the whole context


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("contiguous", "slab", "one slab per sequence: a page table with one page", one_page=True),
        Strategy("head-major", "slab", "a slab, each head's history in one piece", layout="head-major", one_page=True),
        Strategy("repeated", "slab", "a slab with KV heads stored per query head", layout="repeated", one_page=True),
        Strategy("ring", "cyclic", "a fixed ring that holds the window", windowed=True, rolls=True),
        Strategy("sliding", "paged", "pages; those below the window go back to the pool", windowed=True),
        Strategy("sinks", "cyclic", "a ring, and the first tokens stay visible", windowed=True, rolls=True, pinned=4),
        Strategy("paged", "paged", "pages on demand, equal prefixes shared"),
    )
}
AUTO = "auto"
NAMES = (*STRATEGIES, AUTO)


def resolve(name: str, context: int, max_seqs: int) -> Strategy:
    """`auto` is contiguous for one sequence with a short context, otherwise paged."""
    if name == AUTO:
        name = "contiguous" if context < AUTO_CONTEXT and max_seqs == 1 else "paged"
    try:
        return STRATEGIES[name]
    except KeyError:
        raise KvarnError(f"unknown cache strategy {name!r}; there are: {', '.join(NAMES)}") from None
