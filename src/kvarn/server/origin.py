"""Which names the server answers to, and which web pages may use it: the headers Host and Origin, and CORS.

A web page can send requests to every address that its visitor reaches, also to 127.0.0.1. The browser names
the page in Origin. If the page's own name resolves to this server (DNS rebinding), the browser treats both as
one site, but Host still has the page's name.

The checks protect a server without API keys. With keys, a page that has no key gets nothing, and behind a
proxy Host and Origin may be any names. Then a check is made only if its flag is given.
"""

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvarn.errors import KvarnError
from kvarn.server.refusal import Refusal
from kvarn.server.request_log import entry_of
from kvarn.server.schema import show

LOCAL = ("localhost", "host.docker.internal")  # names that only the machine itself, or its containers, resolve
HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/@\\\[\]]+?)\.?(?::([0-9]*))?")
ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([^/]+)")
NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]*")  # names of headers, in a list
DEFAULT_HEADERS = "Authorization, Content-Type, X-Api-Key, X-Request-Id"
PREFLIGHT_SECONDS = 600  # how long a browser may keep the answer to a preflight


class Place(NamedTuple):
    """Host and port of a header. The default ports of http and https count as none."""

    host: str
    port: str

    @property
    def local(self) -> bool:
        ip = _ip(self.host)
        return self.host in LOCAL or self.host.endswith(".localhost") or (ip is not None and ip.is_loopback)


class Sites:
    """`bound`: the names and addresses that the server listens on."""

    def __init__(
        self, bound: Iterable[str] = (), hosts: Iterable[str] = (), origins: Iterable[str] = (), keys: bool = False
    ) -> None:
        self._bound = {_canonical(name) for name in bound}
        self._any_ip = any(ip is not None and ip.is_unspecified for ip in map(_ip, self._bound))
        self._hosts = [_host_flag(name) for name in hosts]
        self._origins = {_origin_flag(origin) for origin in origins}
        self._checks_host = not keys or bool(self._hosts)
        self._checks_origin = not keys or bool(self._origins)

    def check_host(self, header: str | None) -> None:
        """A request of HTTP/1.0 may have no Host; a browser always sends one."""
        if header is None or not self._checks_host:
            return
        place = _place(header)
        if place is None or not self._answers_to(place):
            name = show(header if place is None else place.host)[1:-1]
            raise Refusal(
                403,
                f"the Host of this request, {name}, is not a known name of this server; whoever runs the server "
                f"can allow it with --allowed-host {name}",
                code="host_not_allowed",
            )

    def check_origin(self, origin: str, host: str | None) -> bool:
        """Whether the page may read the answer. Raises if it may not even send the request."""
        if self._allows(origin.lower(), None if host is None else _place(host)):
            return True
        if self._checks_origin:
            shown = show(origin)[1:-1]
            raise Refusal(
                403,
                f"pages of the origin {shown} may not use this server; whoever runs the server can allow it with "
                f"--cors-origin {shown}",
                code="origin_not_allowed",
            )
        return False

    def _answers_to(self, place: Place) -> bool:
        if place.local or place.host in self._bound or (self._any_ip and _ip(place.host) is not None):
            return True
        below = f".{place.host}"
        return any(name in ("*", place.host) or (name[0] == "." and below.endswith(name)) for name in self._hosts)

    def _allows(self, origin: str, host: Place | None) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        page = _page(origin)
        return page is not None and (page.local or page == host)


class OriginCheck:
    """The application behind the checks. It also answers preflights and adds the headers of CORS."""

    def __init__(self, app: ASGIApp, sites: Sites) -> None:
        self._app = app
        self._sites = sites

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host, origin = headers.get("host"), headers.get("origin")
        try:
            self._sites.check_host(host)
            readable = origin is not None and self._sites.check_origin(origin, host)
        except Refusal as refusal:
            entry_of(scope).refused(refusal)
            await refusal.response()(scope, receive, send)
            return
        if origin is None or not readable:
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(origin, headers)(scope, receive, send)
        else:
            await self._app(scope, receive, _readable_by(origin, send))


def _readable_by(origin: str, send: Send) -> Send:
    async def send_readable(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": list(message.get("headers", ()))}
            headers = MutableHeaders(raw=message["headers"])
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = (
                "Retry-After, WWW-Authenticate, X-Kvarn-Ignored, X-Request-Id, Request-Id"
            )
            headers.add_vary_header("Origin")
        await send(message)

    return send_readable


def _preflight(origin: str, asked: Headers) -> Response:
    wanted = asked.get("access-control-request-headers", "")
    headers = {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": wanted if wanted and NAMES.fullmatch(wanted) else DEFAULT_HEADERS,
        "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
        "Vary": "Origin, Access-Control-Request-Headers",
    }
    if asked.get("access-control-request-private-network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    return Response(headers=headers)


def _place(header: str) -> Place | None:
    match = HOST.fullmatch(header.strip())
    if match is None:
        return None
    port = match[2] or ""
    return Place(_canonical(match[1]), "" if port in ("80", "443") else port)


def _page(origin: str) -> Place | None:
    match = ORIGIN.fullmatch(origin)
    return None if match is None else _place(match[2])


def _canonical(host: str) -> str:
    ip = _ip(host)
    return host.lower() if ip is None else str(ip)


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host.strip("[]"))
    except ValueError:
        return None


def _host_flag(name: str) -> str:
    if name == "*":
        return name
    below = name.removeprefix("*") if name.startswith("*.") else name
    match = HOST.fullmatch(below.removeprefix("."))
    if match is None or match[2] is not None or "*" in below:
        raise KvarnError(
            f"--allowed-host is {show(name)[1:-1]}; give a name without a port, .name for it and all below it, or *"
        )
    return ("." if below.startswith(".") else "") + _canonical(match[1])


def _origin_flag(origin: str) -> str:
    origin = origin.lower().removesuffix("/")
    if origin not in ("*", "null") and _page(origin) is None:
        raise KvarnError(f"--cors-origin is {show(origin)[1:-1]}; give https://name, https://name:port, null or *")
    return origin
