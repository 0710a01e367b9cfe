"""Which connection is closed to make room for another, without sockets."""

import asyncio
import errno
import logging
import os
import random
import subprocess
import sys

import pytest

from kvarn.errors import KvarnError
from kvarn.server.accepting import AcceptFailures
from kvarn.server.connection_limits import MOST_REFUSED, ConnectionLimits, OpenConnections, Waiting, limits_for


class Client:
    def __init__(self, address: str = "a") -> None:
        self.address = address
        self.evicted = False

    def evict(self) -> None:
        self.evicted = True


def admitted(connections: OpenConnections, n: int, address: str = "a") -> list[Client]:
    clients = [Client(address) for _ in range(n)]
    assert all(connections.admit(client) for client in clients)
    connections.check()
    return clients


def test_the_oldest_without_a_request_is_closed_for_a_new_one() -> None:
    connections = OpenConnections(ConnectionLimits(4, 4))
    busy, first, second, third = admitted(connections, 4)
    connections.waits(busy, None)
    connections.waits(first, Waiting.HEAD)  # its answer is complete: it is the youngest now
    for closed in (second, third, first):
        fresh = Client()
        assert connections.admit(fresh)
        assert closed.evicted
        connections.waits(fresh, None)
        connections.check()
    assert not busy.evicted
    assert not connections.admit(Client()), "all have a request under way"


def test_heads_are_closed_before_bodies_and_bodies_before_answers() -> None:
    connections = OpenConnections(ConnectionLimits(3, 3))
    reader, body, head = admitted(connections, 3)
    connections.waits(reader, Waiting.READER)
    connections.waits(body, Waiting.BODY)
    for closed in (head, body, reader):
        fresh = Client()
        assert connections.admit(fresh)
        connections.waits(fresh, None)
        assert closed.evicted


def test_an_address_makes_room_for_itself() -> None:
    connections = OpenConnections(ConnectionLimits(8, 2))
    other = admitted(connections, 1, "b")[0]
    first, second = admitted(connections, 2)
    admitted(connections, 1)
    assert (first.evicted, second.evicted, other.evicted) == (True, False, False)
    connections.waits(second, None)
    connections.waits(admitted(connections, 1)[0], None)
    assert not connections.admit(Client()), "both of this address are busy"
    admitted(connections, 2, "c")
    assert not other.evicted


def test_the_refused_are_bounded() -> None:
    connections = OpenConnections(ConnectionLimits(1, 1))
    connections.waits(admitted(connections, 1)[0], None)
    refused = [Client() for _ in range(MOST_REFUSED + 3)]
    assert not any(connections.admit(client) for client in refused)
    assert [client.evicted for client in refused] == [True] * 3 + [False] * MOST_REFUSED
    for client in refused:
        connections.remove(client)
        connections.check()


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_the_counts_hold(seed: int) -> None:
    rng, connections, clients = random.Random(seed), OpenConnections(ConnectionLimits(7, 5)), []
    for _ in range(2000):
        if not clients or rng.random() < 0.4:
            clients.append(Client(rng.choice("abc")))
            connections.admit(clients[-1])
        elif rng.random() < 0.8:
            connections.waits(rng.choice(clients), rng.choice([*Waiting, None, None]))
        else:
            connections.remove(clients.pop(rng.randrange(len(clients))))
        connections.check()
    for client in clients:
        connections.remove(client)
    connections.check()
    admitted(connections, 5, "a")
    admitted(connections, 2, "b")


def test_the_default_limits_leave_files_for_the_process_and_connections_for_others() -> None:
    assert limits_for(1024) == ConnectionLimits(896, 784)
    assert limits_for(65536) == ConnectionLimits(8192, 7168)
    assert limits_for(64) == ConnectionLimits(32, 28)
    assert limits_for(1024, most=10, most_per_address=99, head_seconds=3) == ConnectionLimits(10, 10, 3)
    with pytest.raises(KvarnError, match=r"--max-connections is 900, and this process may open 1024 files, 896 of"):
        limits_for(1024, most=900)


def test_the_limit_of_open_files_is_raised_to_the_systems() -> None:
    program = "from kvarn.server.connection_limits import raise_file_limit as r; print(r(300), r(), r(100))"
    command = ["sh", "-c", 'ulimit -S -n 200 && ulimit -H -n 400 && exec "$@"', "", sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "300 400 400\n"


def test_a_lack_of_files_is_reported_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    failures, loop = AcceptFailures(lambda: now[0]), asyncio.new_event_loop()
    context = {"message": "socket.accept() out of system resource", "exception": OSError(errno.EMFILE, "no files")}
    for seconds, lines in ((0, 1), (30, 1), (59.9, 1), (60, 2), (60, 2), (121, 3)):
        now[0] = 1000.0 + seconds
        for _ in range(100):
            failures(loop, context)
        assert len(caplog.records) == lines
    assert caplog.records[0].message == "cannot accept connections now: no files; they wait (said once a minute)"
    assert caplog.records[0].exc_info is None
    failures(loop, {"message": "another error", "exception": OSError(errno.EPIPE, os.strerror(errno.EPIPE))})
    assert (caplog.records[-1].name, caplog.records[-1].levelno) == ("asyncio", logging.ERROR)
    loop.close()
