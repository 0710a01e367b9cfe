"""The explanations of the last requests, for the keys that made them. Bounded: the oldest are dropped first.

Kept as JSON text, which takes a seventh of the memory of the objects.
"""

import json
from collections import OrderedDict
from typing import Any, NamedTuple


class _Record(NamedTuple):
    owner: bytes
    explained: str


class Records:
    def __init__(self, most: int = 1000) -> None:
        self._most = most
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def add(self, id: str, owner: bytes, explained: dict[str, Any]) -> None:
        self._records[id] = _Record(owner, json.dumps(explained))
        if len(self._records) > self._most:
            self._records.popitem(last=False)

    def get(self, id: str, owner: bytes) -> dict[str, Any] | None:
        """Another's request is answered like one that never was."""
        record = self._records.get(id)
        if record is None or record.owner != owner:
            return None
        explained: dict[str, Any] = json.loads(record.explained)
        return explained

    def recent(self, owner: bytes, n: int = 20) -> list[dict[str, Any]]:
        """The newest first."""
        mine = (record.explained for record in reversed(self._records.values()) if record.owner == owner)
        return [json.loads(explained) for explained, _ in zip(mine, range(n), strict=False)]
