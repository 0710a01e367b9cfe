"""Runs the service: the socket, uvicorn, signals and the shutdown.

After SIGTERM or SIGINT the server accepts no new connections and requests. Running requests may finish
within the drain time; then they are cancelled. A second SIGINT cancels them at once. If a thread still
computes some seconds after that, the process ends without waiting for it.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn

from kvarn.errors import KvarnError
from kvarn.server.accepting import AcceptFailures
from kvarn.server.app import Service
from kvarn.server.connection import Connection
from kvarn.server.connection_limits import ConnectionLimits, OpenConnections

log = logging.getLogger("kvarn")
GRACE_SECONDS = 10.0  # beyond the drain time; a step of a large model may take some
BACKLOG = 2048  # connections that wait in the system
ACCEPTED_AT_ONCE = 16  # few, because room for them is made afterwards


def listen(host: str, port: int, reader_seconds: float) -> socket.socket:
    """Bind a socket. Call it before the model is loaded, so that a port in use is reported at once. Port 0 takes a free
    port."""
    listening = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, proto)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # closes a connection whose client does not acknowledge data
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * min(reader_seconds, 1e6)))
        listening.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        if listening is not None:
            listening.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise KvarnError(f"cannot listen on {host} port {port}: {reason}") from None
    return listening


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Uvicorn with our signal handlers, because its own raise the signals again after the shutdown."""

    def __init__(
        self,
        service: Service,
        limits: ConnectionLimits,
        drain_seconds: float,
        started: Callable[[], None],
        interrupted: Callable[[], None],
    ) -> None:
        # Every install has h11 and asyncio. Naming them makes the server behave the same everywhere.
        super().__init__(
            uvicorn.Config(
                service.app(),
                http=partial(Connection, OpenConnections(limits), service.log),  # type: ignore[arg-type] # it is only called
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=drain_seconds,  # type: ignore[arg-type] # fractions included
                backlog=ACCEPTED_AT_ONCE,
            )
        )
        self._service = service
        self._drain_seconds = drain_seconds
        self._started = started
        self._interrupted = interrupted
        self._interrupts = 0
        self._watchdog: threading.Timer | None = None

    def stopped(self) -> None:
        """The engine's thread has ended. What follows has limits of its own."""
        if self._watchdog is not None:
            self._watchdog.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(AcceptFailures())
        self._service.start(loop)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._asked_to_stop, number)
        await super().startup(sockets=sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)
        self._started()

    def _asked_to_stop(self, number: signal.Signals) -> None:
        if not self._service.draining:
            self._watchdog = threading.Timer(self._drain_seconds + GRACE_SECONDS, _end_process)
            self._watchdog.daemon = True
            self._watchdog.start()
            if number == signal.SIGINT:
                self._interrupted()
            self._service.log.stopping(self._drain_seconds)
        self._service.drain()
        self.should_exit = True
        self._interrupts += number == signal.SIGINT
        if self._interrupts >= 2:
            self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # overrides uvicorn's
        yield


def _end_process() -> None:
    log.error("the server did not stop %g s after its drain time: it ends now", GRACE_SECONDS)
    logging.shutdown()  # flushes
    os._exit(1)


def serve(
    service: Service,
    listening: socket.socket,
    limits: ConnectionLimits,
    drain_seconds: float,
    started: Callable[[], None],
    interrupted: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal comes. `interrupted` is called at the first Ctrl-C, before anything is logged."""
    server = Server(service, limits, drain_seconds, started, interrupted)
    try:
        server.run(sockets=[listening])
    finally:
        service.stop()
        server.stopped()
        service.store()
        listening.close()
        service.log.close()
