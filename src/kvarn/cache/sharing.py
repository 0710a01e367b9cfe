"""How many tokens of a prompt all groups of layers can reuse. Decides; changes nothing."""

from collections.abc import Sequence
from typing import Any

from kvarn.cache.adoption import Adoption, Reason, ReuseLimit
from kvarn.cache.placement import Placement
from kvarn.cache.placements.paged import WORDS

NO_SHARING = Adoption(0, ReuseLimit(Reason.NOT_SHARING, 0))


def match(placements: Sequence[Placement[Any]], seq: int, tokens: Sequence[int]) -> Adoption:
    """The longest prefix that all groups have. The limit is that of the group that has the least."""
    most = reused = max(len(tokens) - 1, 0)
    limit, settled, scarce = ReuseLimit(Reason.END, most), False, placements[0]
    while not settled:  # a shorter reuse moves the window, so each group is asked again
        settled = True
        for placement in placements:
            adoption = placement.match(seq, tokens, reused)
            if adoption.reused < reused:
                (reused, limit), settled, scarce = adoption, False, placement
    if reused < most and len(placements) > 1:
        shared = max(p.match(seq, tokens, most).limit.at for p in placements)
        if shared > limit.at:  # another group remembers more of this prefix: this group's part was evicted and pruned
            limit = ReuseLimit(Reason.OUT_OF_WINDOW if scarce.spec.window is not None else Reason.EVICTED, shared)
    return Adoption(reused, limit)


def parting(had: Sequence[int], tokens: Sequence[int], shared: int, reused: int) -> ReuseLimit:
    """Why a parked sequence with tokens `had` reuses only `reused` tokens of ours. The common prefix has `shared`."""
    if reused < shared:
        return ReuseLimit(Reason.OUT_OF_WINDOW, shared)
    if shared == max(len(tokens) - 1, 0):
        return ReuseLimit(Reason.END, shared)
    if shared == len(had) or not shared:
        return ReuseLimit(Reason.NEW if shared else Reason.NOTHING_SHARED, shared)
    return ReuseLimit(Reason.DIFFERS, shared, tokens[shared], had[shared], tuple(had[shared : shared + WORDS]))
