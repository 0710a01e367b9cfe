"""The explanations of the last requests, by API key. The number is limited; the oldest are dropped first.

They are stored as JSON text, which needs a seventh of the memory of the objects.
"""

import json
from collections import OrderedDict
from typing import Any, NamedTuple


class _Record(NamedTuple):
    owner: bytes
    explanation: str


class Records:
    def __init__(self, most: int = 1000) -> None:
        self._most = most
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def add(self, id: str, owner: bytes, explanation: dict[str, Any]) -> None:
        self._records[id] = _Record(owner, json.dumps(explanation, allow_nan=False))
        if len(self._records) > self._most:
            self._records.popitem(last=False)

    def get(self, id: str, owner: bytes) -> dict[str, Any] | None:
        """None if the request does not exist, or belongs to another key."""
        record = self._records.get(id)
        if record is None or record.owner != owner:
            return None
        explanation: dict[str, Any] = json.loads(record.explanation)
        return explanation

    def recent(self, owner: bytes, n: int = 20) -> list[dict[str, Any]]:
        """The newest first."""
        own = (record.explanation for record in reversed(self._records.values()) if record.owner == owner)
        return [json.loads(explanation) for explanation, _ in zip(own, range(n), strict=False)]
