"""How a package index is opened: credentials, redirects, certificates. Proxies come from the environment.

A password goes only to the scheme, host and port that it was given for. If the index is https, no password
goes to an http address: not that of another index, and none from netrc.
Non-goals: what is read (index.py); client certificates.
"""

import netrc
import os
import ssl
from base64 import b64encode
from contextlib import suppress
from http.client import HTTPMessage, HTTPResponse, HTTPSConnection
from typing import IO
from urllib.parse import unquote
from urllib.request import BaseHandler, HTTPRedirectHandler, HTTPSHandler, OpenerDirector, Request, build_opener

from kvarn.loading.addresses import origin, parsed, public
from kvarn.loading.index_settings import Indexes


def opener_of(indexes: Indexes, asked: str) -> OpenerDirector:
    """For the index `asked`, one of those."""
    return build_opener(_Credentials(indexes.urls, asked), _Redirects(), _Secure(indexes))


class _Credentials(BaseHandler):
    """Adds the Authorization of each host, and never sends it to another host after a redirect."""

    def __init__(self, urls: tuple[str, ...], asked: str) -> None:
        self._only_https = parsed(asked).scheme == "https"
        self._secrets: dict[tuple[str, str, int | None], tuple[str, str]] = {}
        for parts in map(parsed, urls):
            if "@" in parts.netloc:
                self._secrets[origin(parts)] = (unquote(parts.username or ""), unquote(parts.password or ""))

    def http_request(self, request: Request) -> Request:
        parts = parsed(request.full_url)
        if parts.scheme == "http" and self._only_https:
            return request
        secret = self._secrets.get(origin(parts)) or _from_netrc(parts.hostname or "")
        if secret:
            value = b64encode(":".join(secret).encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {value}")
        return request

    https_request = http_request


def _from_netrc(host: str) -> tuple[str, str] | None:
    with suppress(OSError, ValueError, netrc.NetrcParseError):
        found = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
        return None if found is None else (found[0], found[2] or "")
    return None


class _Redirects(HTTPRedirectHandler):
    """Follows a redirect without the login that its address may hold."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        return super().redirect_request(req, fp, code, msg, headers, public(newurl))


class _Secure(HTTPSHandler):
    """Checks certificates, except those of trusted hosts."""

    def __init__(self, indexes: Indexes) -> None:
        super().__init__()
        self._indexes = indexes

    def https_open(self, request: Request) -> HTTPResponse:
        host = getattr(request, "_tunnel_host", None) or request.host  # behind a proxy, `host` is the proxy
        trusted = {host, host.partition(":")[0]} & self._indexes.trusted
        return self.do_open(HTTPSConnection, request, context=self._tls(checked=not trusted))

    def _tls(self, checked: bool) -> ssl.SSLContext:
        context = ssl.create_default_context()
        if not checked:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        elif self._indexes.certificates:
            context.load_verify_locations(self._indexes.certificates)
        return context
