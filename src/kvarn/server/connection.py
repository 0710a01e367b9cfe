"""One connection: uvicorn's HTTP/1.1 protocol, with deadlines and a place among the open connections.

A connection always has a deadline while no request is under way. The head of a request must arrive within
`head_seconds`, counted from the connection or from the first byte of a further head. Uvicorn closes idle
connections. The body has a deadline in app.py, and an answer that is not read has one in call.py.

Every connection waits for one thing at a time:

    HEAD -> BODY -> (the request is under way) -> HEAD
                    (under way) <-> READER: the client does not read

A client may close its sending side after the request and still read the answer (`nc -N`). A client that has
gone looks the same: the end of its data has arrived. The difference shows when something is sent, because
the system of a client that has gone resets the connection. So an interim answer (100 Continue, which every
HTTP/1.1 client discards) is sent until the real answer begins. HTTP/1.0 has no interim answers: there, the
end of the data is the end of the request, unless the answer has begun.
"""

import asyncio
import socket
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvarn.server.connection_limits import OpenConnections, Waiting
from kvarn.server.refusal import Refusal
from kvarn.server.request_id import HEADER, new_id
from kvarn.server.request_log import RequestLog

FIRST_PROBE, LAST_PROBE = 0.05, 5.0  # seconds between two looks at a client that sends no more; they double


class Connection(H11Protocol):
    def __init__(self, connections: OpenConnections, requests: RequestLog, **given: Any) -> None:
        super().__init__(**given)
        self._open_connections = connections
        self._requests = requests
        self._waiting: Waiting | None = Waiting.HEAD
        self._idle = False  # between an answer and the first byte of the next head
        self._ended = False  # a last answer was sent; whatever still arrives is discarded
        self._framed: object = None  # the last request whose framing was checked
        self._half_closed = False  # the client sends no more, but may read
        self._deadline: asyncio.TimerHandle | None = None
        self._next_probe: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def evict(self) -> None:
        """Close at once, to make room."""
        self.transport.abort()

    # -- called by the transport ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        if self._open_connections.admit(self):
            self._expect_head()
        else:
            self._end(Refusal(503, "every connection of this server is in use: try again later", retry_after=1))

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        if self._next_probe is not None:
            self._next_probe.cancel()
        self._open_connections.remove(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        if self._ended or self.transport.is_closing():
            return
        if self._idle:
            self._idle = False
            self._expect_head()
            self._open_connections.waits(self, Waiting.HEAD)  # the newest again
        super().data_received(data)
        self._update()

    def eof_received(self) -> bool | None:  # type: ignore[override] # True: the connection stays open for the answer
        if self._ended or not self._under_way or self.cycle.more_body or not (self._http11 or self._begun):
            return None
        if not self._half_closed:
            self._half_closed = True
            self._probe(FIRST_PROBE)
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update()

    # -- called by uvicorn ---------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update()
        if self._half_closed and (not self._under_way or self.cycle.more_body):
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What arrived is not HTTP. After a complete request it does not matter: its answer ends the connection."""
        if not self._under_way or self.cycle.more_body:
            self._refuse_request()

    def shutdown(self) -> None:
        """The server stops. Only complete requests may go on."""
        if self._under_way and not self.cycle.more_body and not self._ended:
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def _under_way(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _http11(self) -> bool:
        return self.scope["http_version"] == "1.1"

    @property
    def _begun(self) -> bool:
        return self.cycle.response_started

    def _probe(self, seconds: float) -> None:
        """Close the connection if the client has gone, and look again later."""
        if self._ended or self.transport.is_closing() or not self._under_way:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not self._begun:
            self.transport.write(
                self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")) or b""
            )
        self._next_probe = self.loop.call_later(seconds, self._probe, min(2 * seconds, LAST_PROBE))

    def _update(self) -> None:
        """Find out what the connection waits for now, from uvicorn's state."""
        if self._ended or self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle is not self._framed:
            self._framed = self.cycle
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in self.headers}:
                self._refuse_request()  # a proxy may see another end of this request
                return
        if self.flow.write_paused:
            waiting: Waiting | None = Waiting.READER
        elif self._under_way:
            waiting = Waiting.BODY if self.cycle.more_body else None
        else:
            waiting = Waiting.HEAD
        if waiting is self._waiting:
            return
        self._waiting = waiting
        self._open_connections.waits(self, waiting)
        self._cancel_deadline()
        if waiting is Waiting.HEAD:
            # Not idle: the answer came before the end of the body, or bytes of the next head are there already.
            self._idle = self.timeout_keep_alive_task is not None and not self.cycle.more_body
            if not self._idle:
                self._expect_head()

    def _refuse_request(self) -> None:
        """Answer only if no other answer has begun."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # the application must not answer, too
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._end(Refusal(400, "this is not an HTTP/1.1 request that can be read"))
        else:
            self.transport.close()

    def _expect_head(self) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(self._open_connections.limits.head_seconds, self.transport.close)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end(self, refusal: Refusal) -> None:
        """Answer, and let the client close. (A close could reset the connection before the client has read it.)"""
        self._ended = True
        response, entry = refusal.response(), self._requests.begin(new_id(), self.address)
        headers = [*response.raw_headers, (b"connection", b"close"), (HEADER.encode(), entry.id.encode())]
        for event in (
            h11.Response(
                status_code=refusal.status, headers=headers, reason=HTTPStatus(refusal.status).phrase.encode()
            ),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()
        entry.status = refusal.status
        entry.refused(refusal)
        entry.release()
        self.flow.resume_reading()  # or the end of the client's data is not seen
        self._open_connections.waits(self, Waiting.HEAD)
        self._expect_head()
