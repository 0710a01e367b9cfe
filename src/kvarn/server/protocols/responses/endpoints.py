"""The addresses of stored responses, and the count of a response's input tokens."""

import json
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvarn.server.protocols.responses.calls import response_call
from kvarn.server.protocols.responses.reply import ResponseReply
from kvarn.server.protocols.responses.store import Stored
from kvarn.server.refusal import Refusal
from kvarn.server.schema import Json, show

if TYPE_CHECKING:
    from kvarn.server.app import Service

MOST_LISTED, DEFAULT_LISTED = 100, 20


async def create(service: "Service", request: Request) -> Response:
    owner, stored = service.caller(request).owner, service.responses
    parse = partial(response_call, stored=stored, owner=owner)
    eos = service.llm.tokenizer.eos_ids
    return await service.generate(request, parse, partial(ResponseReply, stored=stored, owner=owner, eos=eos))


async def count(service: "Service", request: Request) -> Response:
    parse = partial(response_call, stored=service.responses, owner=service.caller(request).owner)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": await service.count(request, parse)})


async def read(service: "Service", request: Request) -> Response:
    stored = _found(service, request)
    if request.query_params.get("stream", "false") not in ("false", "0"):
        raise Refusal(400, "stream is not implemented here: a stored response is complete", "stream")
    return Response(stored.response, media_type="application/json")


async def delete(service: "Service", request: Request) -> Response:
    id = request.path_params["id"]
    if not service.responses.remove(id, service.caller(request).owner):
        raise _missing()
    return JSONResponse({"id": id, "object": "response", "deleted": True})


async def input_items(service: "Service", request: Request) -> Response:
    items: list[Json] = json.loads(_found(service, request).items)
    query = request.query_params
    order, limit, after = query.get("order", "desc"), query.get("limit", str(DEFAULT_LISTED)), query.get("after")
    if order not in ("asc", "desc"):
        raise Refusal(400, f"order is {show(order)}; it must be one of asc, desc", "order")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 6 and 1 <= int(limit) <= MOST_LISTED):
        raise Refusal(400, f"limit is {show(limit)}; it must be 1 to {MOST_LISTED}", "limit")
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise Refusal(400, "after is no id of an item of this response", "after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(items) > len(page)})


def _found(service: "Service", request: Request) -> Stored:
    stored = service.responses.get(request.path_params["id"], service.caller(request).owner)
    if stored is None:
        raise _missing()
    return stored


def _missing() -> Refusal:
    return Refusal(404, "this key has no such response, or it is no longer stored", "id")
