"""The explanations of the last requests, by API key. The number is limited: the key that has the most loses its oldest,
so no key can push out all records of another.

Of a chat its outline is kept, too: hashes, to compare a later chat with it.

A record is found by the id of the answer, and by the id of the request (x-request-id). A client may use a
request id again; then the newest record is found.

They are stored as JSON text, which needs a seventh of the memory of the objects.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from kvarn.server.outlines import Outline


class _Record(NamedTuple):
    request_id: str
    explanation: str
    ended: float  # seconds since the epoch
    outline: Outline | None


class Records:
    def __init__(self, most: int = 1000) -> None:
        self._most = most
        self._records: dict[bytes, OrderedDict[str, _Record]] = {}  # by owner and id
        self._by_request: dict[tuple[bytes, str], str] = {}

    def add(
        self,
        id: str,
        owner: bytes,
        explanation: dict[str, Any],
        request_id: str = "",
        outline: Outline | None = None,
    ) -> None:
        own = self._records.setdefault(owner, OrderedDict())
        own[id] = _Record(request_id, json.dumps(explanation, allow_nan=False), time.time(), outline)
        self._by_request[owner, request_id] = id
        if sum(map(len, self._records.values())) > self._most:
            self._drop_one()

    def _drop_one(self) -> None:
        owner, records = max(self._records.items(), key=lambda each: len(each[1]))
        oldest, record = records.popitem(last=False)
        if self._by_request.get((owner, record.request_id)) == oldest:
            del self._by_request[owner, record.request_id]

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
        outlines = (each.outline for each in self._newest(owner))
        return [each for each in outlines if each is not None and each.salt == salt]

    def recent(self, owner: bytes, n: int = 20) -> list[dict[str, Any]]:
        """The newest first."""
        return [explanation for _, explanation in self.ended(owner, n)]

    def ended(self, owner: bytes, n: int) -> list[tuple[float, dict[str, Any]]]:
        """When each ended, in seconds since the epoch, and its explanation. The newest first."""
        return [(each.ended, json.loads(each.explanation)) for each in islice(self._newest(owner), n)]

    def _find(self, id: str, owner: bytes) -> _Record | None:
        own = self._records.get(owner, OrderedDict())
        return own.get(id) or own.get(self._by_request.get((owner, id), ""))

    def _newest(self, owner: bytes) -> Iterator[_Record]:
        return reversed(self._records.get(owner, OrderedDict()).values())
