"""The state that watchers see, and its frames: lines of JSON with everything, or with what changed since a tick.

A frame is made for one key. It has no text. A block says whether its text is the key's own, a lane says whose it
is: `own`, `open` (made without a key, so anybody may read its explanation) or `other`, which has numbers only.
Frames that several watchers need are made once.
"""

import json
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvarn.cache.journal import BlockNow, GroupChanges
from kvarn.cache.prefix import root_hash
from kvarn.server.access import Caller
from kvarn.server.page.lanes import Lane
from kvarn.server.page.observer import Counts, Observation

COLUMNS = ("block", "references", "tokens", "position", "branch", "node", "parent", "used", "own")
MOST_LANES = 60  # that have ended
MOST_TICKS = 40  # whose changes are remembered: a watcher that is further behind gets everything


class _Tick(NamedTuple):
    number: int
    blocks: list[set[int]]  # of each group, the changed ones
    lanes: set[int]
    gone: set[int]


class State:
    """`facts`: what does not change, for the first frame."""

    def __init__(self, facts: Mapping[str, Any], n_groups: int) -> None:
        self.tick = 0
        self._facts = facts
        self._blocks: list[dict[int, BlockNow]] = [{} for _ in range(n_groups)]
        self._next: list[list[int]] = [[] for _ in range(n_groups)]
        self._lanes: OrderedDict[int, Lane] = OrderedDict()
        self._counts: Counts | None = None
        self._time = 0.0
        self._log: deque[_Tick] = deque(maxlen=MOST_TICKS)
        self._frames: dict[tuple[int | None, Caller], bytes] = {}

    @property
    def seen(self) -> bool:
        return self._counts is not None

    def forget(self) -> None:
        """Nobody watches: what comes next is a fresh look at everything."""
        for blocks in self._blocks:
            blocks.clear()
        self._log.clear()
        self._frames.clear()
        self._counts = None

    def apply(self, seen: Observation) -> bool:
        """Whether anything changed."""
        blocks = [self._apply_blocks(i, group) for i, group in enumerate(seen.groups)]
        lanes = {each.number for each in seen.lanes if self._lanes.get(each.number) != each}
        self._lanes.update((each.number, each) for each in seen.lanes)
        gone = self._drop_lanes()
        changed = any(blocks) or bool(lanes) or seen.counts != self._counts
        self._counts, self._time = seen.counts, seen.time
        if changed:
            self.tick += 1
            self._log.append(_Tick(self.tick, blocks, lanes, gone))
            self._frames.clear()
        return changed

    def _apply_blocks(self, index: int, group: GroupChanges) -> set[int]:
        known, changed = self._blocks[index], set()
        self._next[index] = group.next
        for block, now in group.blocks.items():
            if known.get(block) != now:
                changed.add(block)
                if now is None:
                    del known[block]
                else:
                    known[block] = now
        return changed

    def _drop_lanes(self) -> set[int]:
        ended = [number for number, lane in self._lanes.items() if lane.finish is not None]
        gone = set(ended[: max(len(ended) - MOST_LANES, 0)])
        for number in gone:
            del self._lanes[number]
        return gone

    def frame(self, since: int | None, caller: Caller, past: Sequence[Lane] = ()) -> bytes:
        """What changed after the tick `since`; everything for None, or if that is too long ago. `past`: earlier lanes,
        for a frame with everything."""
        if since is not None and (not self._log or since < self._log[0].number - 1):
            since = None
        if since is None:
            return self._line(self._whole(caller, past))
        key = (since, caller)
        if key not in self._frames:
            self._frames[key] = self._line(self._delta(since, caller))
        return self._frames[key]

    def _line(self, found: dict[str, Any]) -> bytes:
        return json.dumps(found, separators=(",", ":"), allow_nan=False).encode() + b"\n"

    def _whole(self, caller: Caller, past: Sequence[Lane]) -> dict[str, Any]:
        own, known = _own_root(caller), {lane.request_id for lane in self._lanes.values()}
        lanes = [*(lane for lane in past if lane.request_id not in known), *self._lanes.values()]
        return {
            **self._head(),
            "facts": {**self._facts, "texts": caller.quotes, "columns": COLUMNS},
            "groups": [
                {"blocks": [_row(block, now, own) for block, now in sorted(blocks.items())], "next": following}
                for blocks, following in zip(self._blocks, self._next, strict=True)
            ],
            "lanes": [_visible(lane, caller) for lane in lanes],
        }

    def _delta(self, since: int, caller: Caller) -> dict[str, Any]:
        ticks = [tick for tick in self._log if tick.number > since]
        lanes, own, groups = set[int]().union(*(tick.lanes for tick in ticks)), _own_root(caller), []
        for index, known in enumerate(self._blocks):
            changed = sorted(set[int]().union(*(tick.blocks[index] for tick in ticks)))
            rows = [_row(block, known.get(block), own) for block in changed]
            groups.append({"blocks": rows, "next": self._next[index]})
        return {
            **self._head(),
            "groups": groups,
            "lanes": [_visible(self._lanes[number], caller) for number in sorted(lanes) if number in self._lanes],
            "gone": sorted(set[int]().union(*(tick.gone for tick in ticks))),
        }

    def _head(self) -> dict[str, Any]:
        assert self._counts is not None, "a frame before the first look"
        return {"tick": self.tick, "time": round(self._time, 3), "counts": self._counts._asdict()}


def _own_root(caller: Caller) -> bytes | None:
    """The root of the texts that this caller may see."""
    return root_hash(caller.salt) if caller.quotes else None


def _row(block: int, now: BlockNow | None, own: bytes | None) -> list[float]:
    """In the order of COLUMNS. A free block has its number only."""
    return [block] if now is None else [block, *now[:6], round(now.used, 1), int(now.root == own)]


def _visible(lane: Lane, caller: Caller) -> dict[str, Any]:
    whose = "own" if lane.owner == caller.owner else "other" if lane.owner else "open"
    return {**lane.as_json(), "whose": whose, "request": None if whose == "other" else lane.request_id}
