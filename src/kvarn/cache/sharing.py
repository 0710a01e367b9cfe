"""How many tokens of a prompt all groups of layers can reuse. Decides; changes nothing."""

from collections.abc import Sequence
from typing import Any

from kvarn.cache.adoption import Adoption, Reason, ReuseLimit
from kvarn.cache.placement import Placement
from kvarn.cache.placements.paged import WORDS

NO_SHARING = Adoption(0, ReuseLimit(Reason.NOT_SHARING, 0))


def match(placements: Sequence[Placement[Any]], seq: int, tokens: Sequence[int], tile: int = 1) -> Adoption:
    """The longest prefix that all groups have, in whole tiles. The limit is that of the group that has the least."""
    most = reused = max(len(tokens) - 1, 0)
    limit, settled, scarce = ReuseLimit(Reason.END, most), False, placements[0]
    while not settled:  # a shorter reuse moves the window, so each group is asked again
        settled = True
        for placement in placements:
            adoption = placement.match(seq, tokens, reused)
            if adoption.reused < reused:
                (reused, limit), settled, scarce = adoption, False, placement
        if settled and reused % tile:
            reused, settled = reused - reused % tile, False
    if reused < most and len(placements) > 1:
        shared = max(p.match(seq, tokens, most).limit.at for p in placements)
        if shared > limit.at:  # another group remembers more of this prefix: this group's part was evicted and pruned
            limit = ReuseLimit(Reason.OUT_OF_WINDOW if scarce.spec.window is not None else Reason.EVICTED, shared)
    return Adoption(reused, _of_tiles(limit, reused, tile))


def _of_tiles(limit: ReuseLimit, reused: int, tile: int) -> ReuseLimit:
    """The limit, if reuse ended there or at the begin of its tile. A difference says more than the tile."""
    if reused == limit.at - limit.at % tile < limit.at and limit.reason is not Reason.DIFFERS:
        return ReuseLimit(Reason.TILE, limit.at)
    return limit


def parting(had: Sequence[int], tokens: Sequence[int], shared: int, reused: int, tile: int = 1) -> ReuseLimit:
    """Why a parked sequence with tokens `had` reuses only `reused` tokens of ours. The common prefix has `shared`."""
    if reused not in (shared, shared - shared % tile):
        return ReuseLimit(Reason.OUT_OF_WINDOW, shared)
    return _of_tiles(_parting(had, tokens, shared), reused, tile)


def _parting(had: Sequence[int], tokens: Sequence[int], shared: int) -> ReuseLimit:
    if shared == max(len(tokens) - 1, 0):
        return ReuseLimit(Reason.END, shared)
    if shared == len(had) or not shared:
        return ReuseLimit(Reason.NEW if shared else Reason.NOTHING_SHARED, shared)
    return ReuseLimit(Reason.DIFFERS, shared, tokens[shared], had[shared], tuple(had[shared : shared + WORDS]))
