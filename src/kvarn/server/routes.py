"""The application around the endpoints: addresses, methods, and errors in the form of each protocol.

Clients write one address in several ways. So every endpoint is also found with a slash at the end, and those
below /v1 also without /v1. Nothing is redirected: a redirected POST loses its body in some clients.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kvarn.errors import printable
from kvarn.server.faults import ErrorForm, openai_error, refuse
from kvarn.server.refusal import Refusal
from kvarn.server.request_log import CLOSED

Endpoint = Callable[[Request], Awaitable[Response]]


class Bound(NamedTuple):
    """An endpoint at its address. One of GET also answers HEAD. `form`: of its errors."""

    method: str
    path: str
    endpoint: Endpoint
    form: ErrorForm = openai_error


def application(bound: Sequence[Bound]) -> Starlette:
    routes = [
        Route(address, _guarded(each.endpoint, each.form), methods=[each.method])
        for each in bound
        for address in _addresses(each.path)
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _not_found})
    app.router.redirect_slashes = False
    return app


def _addresses(path: str) -> list[str]:
    names = [path, path.removeprefix("/v1")] if path.startswith("/v1/") else [path]
    return [address for name in names for address in (name, f"{name.rstrip('/')}/")]


def _guarded(endpoint: Endpoint, form: ErrorForm) -> Endpoint:
    """Turn every error of the endpoint into an error response."""

    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=CLOSED)
        except Exception as error:  # noqa: BLE001 (reported to the caller)
            return refuse(request.scope, error, form)

    return guarded


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: "there is nothing here; GET / lists the endpoints", 405: "this address takes another method"}
    message = f"{request.method} {printable(request.url.path, 200)}: {what.get(error.status_code, error.detail)}"
    response = refuse(request.scope, Refusal(error.status_code, message))
    response.headers.update(error.headers or {})  # Allow
    return response
