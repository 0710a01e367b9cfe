"""Downloads a wheel from a configured package index, with the standard library only.

An index is asked for the files of a project (PEP 691: JSON; PEP 503: HTML). The wheel is streamed into a
folder under a temporary name, its length and its hash are compared with what the index says, and only
then it gets its name. What an index says is not trusted: types, lengths and addresses are checked.
Non-goals: passwords and certificates (index_access.py), choosing versions or platforms (the version is
given, and the wheel fits every platform), dependencies, resuming.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from html.parser import HTMLParser
from http.client import HTTPException, InvalidURL
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
from urllib.request import OpenerDirector, Request, url2pathname

from kvarn.errors import PullFailed, printable
from kvarn.loading.addresses import BadAddress, parsed, public, without_logins
from kvarn.loading.index_access import opener_of
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
    if indexes.unreadable:
        reasons.append(f"{BadAddress()}; check PIP_INDEX_URL and the other settings of pip and uv")
    for url in indexes.urls:
        try:
            opener = opener_of(indexes, url)
            page = f"{public(url).rstrip('/')}/{_normal(project)}/"
            links = _links(opener, page, indexes.timeout)
            link = next((each for each in links if _is_wheel_of(each.file, project, version)), None)
            if link is not None:
                address = _address_of(link, page)
                return _download(opener, link, address, folder, indexes.timeout, longest, requirement, progress)
            reasons.append("the index has no wheel of this version")
        except (OSError, HTTPException, ValueError, OverflowError) as e:
            reasons.append(_reason(e))
    raise PullFailed(reasons[-1] if reasons else "no package index is configured")


def _reason(error: Exception) -> str:
    """Why it failed, without any part of an address: it could be part of a password."""
    if isinstance(error, PullFailed):
        return str(error)
    if isinstance(error, HTTPError):
        error.close()
        if error.code == 404:
            return "the index does not have it"
        return f"the index answered {error.code} {printable(without_logins(str(error.reason)), 80)}"
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, BadAddress | InvalidURL | UnicodeError):
        return str(BadAddress())
    if isinstance(cause, OSError) and (text := cause.strerror or str(cause)):
        return printable(without_logins(text), 200)
    return "its answer cannot be used" if isinstance(cause, str) else f"it failed with {type(cause).__name__}"


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
    return _html_links(body, url)


def _no_list() -> PullFailed:
    return PullFailed("the index answered with something that is no list of files")


def _html_links(body: bytes, url: str) -> list[Link]:
    parser = _Page()
    try:
        parser.feed(body.decode("utf-8", "replace"))
    except AssertionError:  # how the parser says that a declaration is malformed
        raise _no_list() from None
    links = []
    for href in parser.hrefs:
        with suppress(ValueError):  # a malformed address cannot be the one that is needed
            target, fragment = urldefrag(urljoin(urljoin(url, parser.base), href))
            name, _, digest = fragment.partition("=")
            hashes = {name: digest} if digest else {}
            links.append(Link(unquote(urlsplit(target).path.rsplit("/", 1)[-1]), target, hashes))
    return links


def _json_links(body: bytes, url: str) -> list[Link]:
    try:
        files = json.loads(body)["files"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _no_list() from None
    if not isinstance(files, list):
        raise _no_list()
    return [link for each in files if (link := _json_link(each, url)) is not None]


def _json_link(entry: Any, url: str) -> Link | None:
    """None if the entry is none."""
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("filename", "url")):
        return None
    hashes = entry.get("hashes")
    texts = {name: text for name, text in hashes.items() if isinstance(text, str)} if isinstance(hashes, dict) else {}
    with suppress(ValueError):
        return Link(entry["filename"], urljoin(url, entry["url"]), texts)
    return None


def _address_of(link: Link, page: str) -> str:
    """The address of a file, if the page may name it: an index on the network may not name files of this machine."""
    url = public(link.url)
    if parsed(url).scheme == "file" and parsed(page).scheme != "file":
        raise PullFailed("the index names a file of this machine, which is refused")
    return _regular(url)


def _regular(url: str) -> str:
    """Reading a pipe or a device may never end."""
    parts = parsed(url)
    path = Path(url2pathname(parts.path))
    if parts.scheme == "file" and path.exists() and not path.is_file():
        raise PullFailed("the index names something that is no regular file, which is refused")
    return url


def _openable(url: str) -> str:
    """For folders, as pip has it: their index.html."""
    parts = parsed(url)
    if parts.scheme == "file" and Path(url2pathname(parts.path)).is_dir():
        url = url.rstrip("/") + "/index.html"
    return _regular(url)


def _download(
    opener: OpenerDirector,
    link: Link,
    address: str,
    folder: Path,
    timeout: float,
    longest: int,
    what: str,
    progress: Progress,
) -> Path:
    known = next((name for name in ("sha256", "sha512", "sha384") if name in link.hashes), None)
    digest = hashlib.new(known or "sha256")
    partial = folder / "download.part"
    with opener.open(Request(address), timeout=timeout) as answer, partial.open("wb") as out:
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
