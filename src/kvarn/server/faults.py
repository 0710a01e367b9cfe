"""What a client is told when its request fails: the HTTP status of every error, and the entry in the log."""

import logging
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from kvarn.errors import BadSnapshot, KvarnError, NoRoomNow, PromptTooLong, QueueFull
from kvarn.lasting.collection import NoSnapshot
from kvarn.server.refusal import Refusal
from kvarn.server.request_log import entry_of

ErrorForm = Callable[[Refusal, str], dict[str, Any]]  # the body for a refusal and the id of its request

log = logging.getLogger("kvarn")


def fault(error: Exception, retry_after: int = 1) -> Refusal:
    """The refusal that the client gets for an error."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, QueueFull):
        return Refusal(429, str(error), code="queue_full", retry_after=retry_after)
    if isinstance(error, PromptTooLong):  # its message speaks of flags, which are not the client's
        message = "the prompt and its answer do not fit into this server's context: shorten the prompt"
        return Refusal(400, message, code="context_length_exceeded")
    if isinstance(error, NoRoomNow):
        return Refusal(503, str(error), code="no_room", retry_after=retry_after)
    if isinstance(error, NoSnapshot):
        return Refusal(404, str(error), "id")
    if isinstance(error, BadSnapshot):
        return Refusal(409, str(error), code="bad_snapshot")
    if isinstance(error, KvarnError):
        return Refusal(400, str(error))
    log.error("a request failed: %s: %s", type(error).__name__, error)
    return Refusal(500, f"the request failed: internal error of the server ({type(error).__name__})")


def openai_error(refusal: Refusal, request_id: str) -> dict[str, Any]:
    return refusal.body()


def refuse(scope: Scope, error: Exception, form: ErrorForm = openai_error) -> Response:
    """The error response. It is noted in the log."""
    refusal, entry = fault(error), entry_of(scope)
    entry.refused(refusal)
    return refusal.response(form(refusal, entry.id))
