"""The explanations of the last requests, for whoever made them. Bounded; the oldest go first."""

from collections import OrderedDict
from typing import Any, NamedTuple


class _Record(NamedTuple):
    owner: bytes
    told: dict[str, Any]


class Records:
    def __init__(self, most: int = 1000) -> None:
        self._most = most
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def add(self, id: str, owner: bytes, told: dict[str, Any]) -> None:
        self._records[id] = _Record(owner, told)
        if len(self._records) > self._most:
            self._records.popitem(last=False)

    def get(self, id: str, owner: bytes) -> dict[str, Any] | None:
        """Another's request is answered like one that never was."""
        record = self._records.get(id)
        return record.told if record is not None and record.owner == owner else None

    def recent(self, owner: bytes, n: int = 20) -> list[dict[str, Any]]:
        """The newest first."""
        mine = (record.told for record in reversed(self._records.values()) if record.owner == owner)
        return [told for told, _ in zip(mine, range(n), strict=False)]
