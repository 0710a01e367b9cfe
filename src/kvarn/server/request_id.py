"""Every request has an id: its own X-Request-Id if that is sane, else a new one. Every answer carries it.

This is the outermost part of the application. It begins and ends the request's entry in the log, and it
answers in OpenAI's format if the application raises.
"""

import logging
import time
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvarn.server.refusal import Refusal
from kvarn.server.request_log import ENTRY, RequestLog

log = logging.getLogger("kvarn")

HEADER = "x-request-id"
ALSO = ("request-id",)  # as Anthropic's clients expect it
LONGEST = 128


def sane(id: str) -> bool:
    return 0 < len(id) <= LONGEST and id.isascii() and id.isprintable()


def new_id() -> str:
    return uuid.uuid4().hex


class Identified:
    def __init__(self, app: ASGIApp, requests: RequestLog) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        client = (scope.get("client") or ("",))[0]
        entry = self._requests.begin(given if sane(given) else new_id(), client, scope["method"], scope["path"])
        begun = False

        async def send_identified(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun, entry.status = True, message["status"]
                heads = [(name.encode(), entry.id.encode("ascii")) for name in (HEADER, *ALSO)]
                message = {**message, "headers": [*message.get("headers", ()), *heads]}
            await send(message)

        try:
            await self._app({**scope, ENTRY: entry}, receive, send_identified)
        except Exception as error:
            log.exception("a request failed")
            refusal = Refusal(500, f"the request failed: internal error of the server ({type(error).__name__})")
            entry.refused(refusal)
            if begun:
                raise
            await refusal.response()(scope, receive, send_identified)
        finally:
            entry.sent = time.perf_counter()
            entry.release()
