"""Strategies: names for points in the product of the axes. A strategy has no code of its own."""

from dataclasses import dataclass

from kvarn.errors import KvarnError

AUTO_CONTEXT = 2048  # from here on `auto` is paged, whatever the batch


@dataclass(frozen=True, slots=True)
class Strategy:
    name: str
    placement: str
    summary: str
    layout: str | None = None  # the layout it stands for; None: the backend's choice, or the user's
    windowed: bool = False  # has a window even where the model has none: the user's, or the context
    pinned: int = 0  # first tokens that stay visible, unless the user says otherwise
    one_page: bool = False  # a block is the whole slab unless the user names a size


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("contiguous", "slab", "one slab per sequence: a page table with one page", one_page=True),
        Strategy("head-major", "slab", "a slab, each head's history in one piece", layout="head-major", one_page=True),
        Strategy("repeated", "slab", "a slab with KV heads stored per query head", layout="repeated", one_page=True),
        Strategy("ring", "cyclic", "a fixed ring that holds the window", windowed=True),
        Strategy("sliding", "paged", "pages; those below the window go back to the pool", windowed=True),
        Strategy("sinks", "cyclic", "a ring, and the first tokens stay visible", windowed=True, pinned=4),
        Strategy("paged", "paged", "pages on demand, equal prefixes shared"),
    )
}
AUTO = "auto"
NAMES = (*STRATEGIES, AUTO)


def resolve(name: str, context: int, max_seqs: int) -> Strategy:
    """`auto` is decided here, once: short and single -> contiguous, else paged."""
    if name == AUTO:
        name = "contiguous" if context < AUTO_CONTEXT and max_seqs == 1 else "paged"
    try:
        return STRATEGIES[name]
    except KeyError:
        raise KvarnError(f"unknown cache strategy {name!r}; there are: {', '.join(NAMES)}") from None
