"""How many connections may be open, and which one is closed to make room for a new one.

A connection without a complete request costs its client nothing, so it never keeps another client out: the
oldest of them is closed for the new one. A new connection is refused only if every open one has a request
under way. Non-goals: deadlines and HTTP, which are in connection.py.
"""

import contextlib
import resource
from collections import Counter, OrderedDict
from enum import Enum
from typing import NamedTuple, Protocol

from kvarn.errors import KvarnError

MOST_FILES = 65536  # the limit of open files is raised up to this
MOST_CONNECTIONS = 8192  # by default; an idle connection takes about 8 KiB
RESERVED_FILES = 128  # for the process itself, and for connections that are accepted before older ones are closed
MOST_REFUSED = 16  # refused connections that stay open until the client has read the refusal
HEAD_SECONDS = 20.0  # a client must send the head of a request in this time


class ConnectionLimits(NamedTuple):
    most: int  # open connections
    most_per_address: int
    head_seconds: float = HEAD_SECONDS


class Waiting(Enum):
    """What a connection waits for. Connections are closed to make room in this order."""

    HEAD = "the head of a request; also an idle connection"
    BODY = "the body of a request"
    READER = "a client that does not read its answer"


class Member(Protocol):
    @property
    def address(self) -> str: ...

    def evict(self) -> None: ...


class _Line:
    """Connections that wait for the same thing, those of all addresses and of each. The oldest comes first."""

    def __init__(self) -> None:
        self._all: OrderedDict[Member, None] = OrderedDict()
        self._of: dict[str, OrderedDict[Member, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, member: Member) -> bool:
        return member in self._all

    def join(self, member: Member) -> None:
        self._all[member] = self._of.setdefault(member.address, OrderedDict())[member] = None

    def leave(self, member: Member) -> None:
        if member in self._all:
            del self._all[member]
            own = self._of[member.address]
            del own[member]
            if not own:
                del self._of[member.address]

    def oldest(self, address: str | None) -> Member | None:
        return next(iter(self._all if address is None else self._of.get(address, ())), None)


class OpenConnections:
    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._open: set[Member] = set()
        self._count: Counter[str] = Counter()
        self._lines = {waiting: _Line() for waiting in Waiting}
        self._refused = _Line()

    def admit(self, member: Member) -> bool:
        """Add a connection that waits for a head. False if there is no room: it is one of the refused."""
        address = member.address
        if (self._count[address] < self.limits.most_per_address or self._close_oldest(address)) and (
            len(self._open) < self.limits.most or self._close_oldest(None)
        ):
            self._open.add(member)
            self._count[address] += 1
            self._lines[Waiting.HEAD].join(member)
            return True
        if len(self._refused) >= MOST_REFUSED and (oldest := self._refused.oldest(None)) is not None:
            self._refused.leave(oldest)
            oldest.evict()
        self._refused.join(member)
        return False

    def waits(self, member: Member, waiting: Waiting | None) -> None:
        """The connection now waits for something else; None: its request is under way."""
        if member in self._open:
            for line in self._lines.values():
                line.leave(member)
            if waiting is not None:
                self._lines[waiting].join(member)

    def remove(self, member: Member) -> None:
        self._refused.leave(member)
        if member in self._open:
            self.waits(member, None)
            self._open.remove(member)
            self._count[member.address] -= 1
            if not self._count[member.address]:
                del self._count[member.address]

    def _close_oldest(self, address: str | None) -> bool:
        for line in self._lines.values():
            if (oldest := line.oldest(address)) is not None:
                self.remove(oldest)
                oldest.evict()
                return True
        return False

    def check(self) -> None:
        assert sum(self._count.values()) == len(self._open) <= self.limits.most
        assert all(0 < n <= self.limits.most_per_address for n in self._count.values())
        assert sum(len(line) for line in self._lines.values()) <= len(self._open)
        assert len(self._refused) <= MOST_REFUSED


def raise_file_limit(most: int = MOST_FILES) -> int:
    """Raise the limit of open files towards the system's hard limit. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems allow less than their hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return most if soft == resource.RLIM_INFINITY else soft


def limits_for(
    n_files: int, most: int | None = None, most_per_address: int | None = None, head_seconds: float = HEAD_SECONDS
) -> ConnectionLimits:
    """The limits for a process that may open so many files. An eighth is kept for other addresses by default: one
    address can be a proxy in front of all clients, so it may have most of the connections."""
    room = n_files - min(RESERVED_FILES, n_files // 2)
    if most is None:
        most = min(room, MOST_CONNECTIONS)
    if most > room:
        raise KvarnError(
            f"--max-connections is {most}, and this process may open {n_files} files, {room} of them for connections: "
            "raise the limit (ulimit -n) or lower the flag"
        )
    if most_per_address is None:
        most_per_address = most - most // 8
    return ConnectionLimits(most, min(most_per_address, most), head_seconds)
