"""The explanations of the last requests, by API key. The number is limited; the oldest are dropped first.

Of a chat its outline is kept, too: hashes, to compare a later chat with it.

A record is found by the id of the answer, and by the id of the request (x-request-id). A client may use a
request id again; then the newest record is found.

They are stored as JSON text, which needs a seventh of the memory of the objects.
"""

import json
from collections import OrderedDict
from typing import Any, NamedTuple

from kvarn.server.outlines import Outline


class _Record(NamedTuple):
    owner: bytes
    request_id: str
    explanation: str
    outline: Outline | None


class Records:
    def __init__(self, most: int = 1000) -> None:
        self._most = most
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._by_request: dict[tuple[bytes, str], str] = {}  # no key can hide another key's record

    def add(
        self,
        id: str,
        owner: bytes,
        explanation: dict[str, Any],
        request_id: str = "",
        outline: Outline | None = None,
    ) -> None:
        self._records[id] = _Record(owner, request_id, json.dumps(explanation, allow_nan=False), outline)
        self._by_request[owner, request_id] = id
        if len(self._records) > self._most:
            oldest, record = self._records.popitem(last=False)
            if self._by_request.get((record.owner, record.request_id)) == oldest:
                del self._by_request[record.owner, record.request_id]

    def get(self, id: str, owner: bytes) -> dict[str, Any] | None:
        """`id`: of the answer, or of the request. None if there is none, or it belongs to another key."""
        record = self._find(id, owner)
        if record is None:
            return None
        explanation: dict[str, Any] = json.loads(record.explanation)
        return explanation

    def outline(self, id: str, owner: bytes) -> Outline | None:
        record = self._find(id, owner)
        return None if record is None else record.outline

    def outlines(self, owner: bytes, salt: bytes) -> list[Outline]:
        """Of the chats of this key and salt, the newest first."""
        own = (each.outline for each in reversed(self._records.values()) if each.owner == owner)
        return [each for each in own if each is not None and each.salt == salt]

    def _find(self, id: str, owner: bytes) -> _Record | None:
        record = self._records.get(id) or self._records.get(self._by_request.get((owner, id), ""))
        return None if record is None or record.owner != owner else record

    def recent(self, owner: bytes, n: int = 20) -> list[dict[str, Any]]:
        """The newest first."""
        own = (record.explanation for record in reversed(self._records.values()) if record.owner == owner)
        return [json.loads(explanation) for explanation, _ in zip(own, range(n), strict=False)]
