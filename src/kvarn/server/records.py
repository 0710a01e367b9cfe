"""The explanations of the last requests, by API key. The number is limited; the oldest are dropped first.

A record is found by the id of the answer, and by the id of the request (x-request-id). A client may use a
request id again; then the newest record is found.

They are stored as JSON text, which needs a seventh of the memory of the objects.
"""

import json
from collections import OrderedDict
from typing import Any, NamedTuple


class _Record(NamedTuple):
    owner: bytes
    request_id: str
    explanation: str


class Records:
    def __init__(self, most: int = 1000) -> None:
        self._most = most
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._by_request: dict[tuple[bytes, str], str] = {}  # no key can hide another key's record

    def add(self, id: str, owner: bytes, explanation: dict[str, Any], request_id: str = "") -> None:
        self._records[id] = _Record(owner, request_id, json.dumps(explanation, allow_nan=False))
        self._by_request[owner, request_id] = id
        if len(self._records) > self._most:
            oldest, record = self._records.popitem(last=False)
            if self._by_request.get((record.owner, record.request_id)) == oldest:
                del self._by_request[record.owner, record.request_id]

    def get(self, id: str, owner: bytes) -> dict[str, Any] | None:
        """`id`: of the answer, or of the request. None if there is none, or it belongs to another key."""
        record = self._records.get(id) or self._records.get(self._by_request.get((owner, id), ""))
        if record is None or record.owner != owner:
            return None
        explanation: dict[str, Any] = json.loads(record.explanation)
        return explanation

    def recent(self, owner: bytes, n: int = 20) -> list[dict[str, Any]]:
        """The newest first."""
        own = (record.explanation for record in reversed(self._records.values()) if record.owner == owner)
        return [json.loads(explanation) for explanation, _ in zip(own, range(n), strict=False)]
