"""Stored responses: what can be read again, and the tokens that a next response continues.

The store has a limit of bytes and of responses; those that were not used for the longest time are dropped first. A
response belongs to the API key that made it: for any other key there is none. Any thread may call.
"""

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock

MOST_BYTES = 64 << 20
MOST_RESPONSES = 4096
OVERHEAD = 1024  # bytes of an entry besides its texts and tokens


@dataclass(frozen=True, slots=True)
class Stored:
    """Texts are JSON.

    head        what the beginning of the prompt was made from, besides messages
    messages    of the conversation, the answer included, without instructions
    items       of the request's input, as they are listed
    tokens      of the prompt and the answer, without the end of the turn
    """

    owner: bytes
    response: str
    head: str
    messages: str
    items: str
    tokens: "array[int]"

    @property
    def size(self) -> int:
        texts = (self.response, self.head, self.messages, self.items)
        return OVERHEAD + 4 * sum(map(len, texts)) + self.tokens.itemsize * len(self.tokens)


class Responses:
    def __init__(self, most_bytes: int = MOST_BYTES, most: int = MOST_RESPONSES) -> None:
        self._most_bytes = most_bytes
        self._most = most
        self._bytes = 0
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._lock = Lock()

    def add(self, id: str, stored: Stored) -> None:
        """One that is larger than the store is not stored."""
        if stored.size > self._most_bytes:
            return
        with self._lock:
            self._stored[id] = stored
            self._bytes += stored.size
            while self._bytes > self._most_bytes or len(self._stored) > self._most:
                self._bytes -= self._stored.popitem(last=False)[1].size

    def get(self, id: str, owner: bytes) -> Stored | None:
        with self._lock:
            found = self._stored.get(id)
            if found is None or found.owner != owner:
                return None
            self._stored.move_to_end(id)
            return found

    def remove(self, id: str, owner: bytes) -> bool:
        with self._lock:
            found = self._stored.get(id)
            if found is None or found.owner != owner:
                return False
            self._bytes -= self._stored.pop(id).size
            return True

    def check(self) -> None:
        with self._lock:
            assert self._bytes == sum(each.size for each in self._stored.values()) <= self._most_bytes
            assert len(self._stored) <= self._most
