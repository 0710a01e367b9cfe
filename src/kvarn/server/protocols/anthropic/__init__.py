"""Anthropic's messages, and the count of their tokens."""

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvarn.server.protocols.anthropic.calls import FIELDS, messages_call
from kvarn.server.protocols.anthropic.reply import MessagesReply, anthropic_error
from kvarn.server.protocols.base import Address, Spoken, text

if TYPE_CHECKING:
    from kvarn.server.app import Service


async def _count(service: "Service", request: Request) -> Response:
    service.caller(request)
    return JSONResponse({"input_tokens": await service.count(request, messages_call)})


ANTHROPIC = Spoken(
    [
        text("/v1/messages", "answer a conversation", messages_call, MessagesReply, FIELDS),
        Address("POST", "/v1/messages/count_tokens", "the number of tokens of a conversation", _count, FIELDS),
    ],
    anthropic_error,
)
