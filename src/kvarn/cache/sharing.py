"""How much of a prompt can be reused, over all groups of layers. Decides and changes nothing."""

from collections.abc import Sequence
from typing import Any

from kvarn.cache.placement import Adoption, Placement, Reason, Stop
from kvarn.cache.placements.paged import WORDS

NO_SHARING = Adoption(0, Stop(Reason.NOT_SHARING, 0))


def match(placements: Sequence[Placement[Any]], seq: int, tokens: Sequence[int]) -> Adoption:
    """What all groups can serve, and why not more: the stop of the group that limits it."""
    most = limit = max(len(tokens) - 1, 0)
    stop, settled, scarce = Stop(Reason.END, most), False, placements[0]
    while not settled:  # a windowed group can have a hole that a shorter reuse of the others must respect
        settled = True
        for placement in placements:
            found = placement.match(seq, tokens, limit)
            if found.reused < limit:
                limit, stop, settled, scarce = found.reused, found.stop, False, placement
    if limit < most and len(placements) > 1:
        known = max(p.match(seq, tokens, most).stop.at for p in placements)
        if known > stop.at:  # another group knows more: this one had it too, and has forgotten even that
            stop = Stop(Reason.OUT_OF_WINDOW if scarce.spec.window is not None else Reason.EVICTED, known)
    return Adoption(limit, stop)


def parting(had: Sequence[int], tokens: Sequence[int], shared: int, reused: int) -> Stop:
    """Why a kept sequence of tokens `had`, which shares `shared` with ours, serves `reused` of them."""
    if reused < shared:
        return Stop(Reason.OUT_OF_WINDOW, shared)
    if shared == max(len(tokens) - 1, 0):
        return Stop(Reason.END, shared)
    if shared == len(had) or not shared:
        return Stop(Reason.NEW if shared else Reason.NOTHING_SHARED, shared)
    return Stop(Reason.DIFFERS, shared, tokens[shared], had[shared], tuple(had[shared : shared + WORDS]))
