"""Stored responses: what can be read again, and the tokens that a next response continues.

The store has a limit of bytes and of responses. If it is full, the key that has the most of what is short loses the
response that it has not used for the longest time, so no key can push out all responses of another. A response belongs
to the API key that made it: for any other key there is none. Any thread may call.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Shelf:
    """The responses of one key, the least recently used first."""

    stored: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    n_bytes: int = 0

    def add(self, id: str, stored: Stored) -> None:
        self.stored[id] = stored
        self.n_bytes += stored.size

    def remove(self, id: str) -> None:
        self.n_bytes -= self.stored.pop(id).size


class Responses:
    def __init__(self, most_bytes: int = MOST_BYTES, most: int = MOST_RESPONSES) -> None:
        self._most_bytes = most_bytes
        self._most = most
        self._shelves: dict[bytes, _Shelf] = {}  # by owner; the keys of a server are few
        self._lock = Lock()

    def add(self, id: str, stored: Stored) -> None:
        """One that is larger than the store is not stored."""
        if stored.size > self._most_bytes:
            return
        with self._lock:
            self._shelves.setdefault(stored.owner, _Shelf()).add(id, stored)
            while sum(map(_n_bytes, self._shelves.values())) > self._most_bytes:
                self._drop_one(_n_bytes)
            while sum(map(_n_stored, self._shelves.values())) > self._most:
                self._drop_one(_n_stored)

    def get(self, id: str, owner: bytes) -> Stored | None:
        with self._lock:
            shelf = self._shelves.get(owner)
            if shelf is None or id not in shelf.stored:
                return None
            shelf.stored.move_to_end(id)
            return shelf.stored[id]

    def remove(self, id: str, owner: bytes) -> bool:
        with self._lock:
            shelf = self._shelves.get(owner)
            if shelf is None or id not in shelf.stored:
                return False
            shelf.remove(id)
            return True

    def check(self) -> None:
        with self._lock:
            for shelf in self._shelves.values():
                assert shelf.n_bytes == sum(each.size for each in shelf.stored.values())
            assert sum(map(_n_bytes, self._shelves.values())) <= self._most_bytes
            assert sum(map(_n_stored, self._shelves.values())) <= self._most

    def _drop_one(self, size: Callable[[_Shelf], int]) -> None:
        largest = max(self._shelves.values(), key=size)
        largest.remove(next(iter(largest.stored)))


def _n_bytes(shelf: _Shelf) -> int:
    return shelf.n_bytes


def _n_stored(shelf: _Shelf) -> int:
    return len(shelf.stored)
