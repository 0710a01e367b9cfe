"""How much of a prompt can be reused, over all groups of layers. Decides and changes nothing."""

from collections.abc import Sequence
from typing import Any

from kvarn.cache.placement import Adoption, Placement, Reason, ReuseLimit
from kvarn.cache.placements.paged import WORDS

NO_SHARING = Adoption(0, ReuseLimit(Reason.NOT_SHARING, 0))


def match(placements: Sequence[Placement[Any]], seq: int, tokens: Sequence[int]) -> Adoption:
    """What all groups can serve, and why not more: the limit of the group that can serve least."""
    most = limit = max(len(tokens) - 1, 0)
    ended, settled, scarce = ReuseLimit(Reason.END, most), False, placements[0]
    while not settled:  # a windowed group can have a hole that a shorter reuse of the others must respect
        settled = True
        for placement in placements:
            found = placement.match(seq, tokens, limit)
            if found.reused < limit:
                limit, ended, settled, scarce = found.reused, found.limit, False, placement
    if limit < most and len(placements) > 1:
        known = max(p.match(seq, tokens, most).limit.at for p in placements)
        if known > ended.at:  # another group remembers more, so this group's part was evicted and pruned
            ended = ReuseLimit(Reason.OUT_OF_WINDOW if scarce.spec.window is not None else Reason.EVICTED, known)
    return Adoption(limit, ended)


def parting(had: Sequence[int], tokens: Sequence[int], shared: int, reused: int) -> ReuseLimit:
    """Why a parked sequence of tokens `had`, which shares `shared` with ours, serves `reused` of them."""
    if reused < shared:
        return ReuseLimit(Reason.OUT_OF_WINDOW, shared)
    if shared == max(len(tokens) - 1, 0):
        return ReuseLimit(Reason.END, shared)
    if shared == len(had) or not shared:
        return ReuseLimit(Reason.NEW if shared else Reason.NOTHING_SHARED, shared)
    return ReuseLimit(Reason.DIFFERS, shared, tokens[shared], had[shared], tuple(had[shared : shared + WORDS]))
