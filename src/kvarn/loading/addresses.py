"""Addresses of package indexes and of their files, and what of them may be shown.

An address can hold a user and a password. No function here puts a part of an address into an error.
"""

import re
from urllib.parse import SplitResult, urlsplit

SCHEMES = ("http", "https", "file")
_PORTS = {"http": 80, "https": 443}
_LOGIN = re.compile(r"(?<=://)\S*@")


class BadAddress(ValueError):
    """An address that cannot be used. The message never quotes it."""

    def __init__(self) -> None:
        super().__init__("an address is malformed; signs such as # / @ in a password are written %23 %2F %40")


def parsed(url: str) -> SplitResult:
    """The parts of an address of one of the SCHEMES, with a host and a port that can be."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (raises if it is no number)
    except ValueError:
        raise BadAddress from None
    if parts.scheme not in SCHEMES or (parts.scheme != "file" and not parts.hostname):
        raise BadAddress
    return parts


def public(url: str) -> str:
    """Without user and password."""
    parts = parsed(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def origin(parts: SplitResult) -> tuple[str, str, int | None]:
    """What a password belongs to: scheme, host and port."""
    return parts.scheme, parts.hostname or "", parts.port or _PORTS.get(parts.scheme)


def without_logins(text: str) -> str:
    """A line of another program, with the logins of its addresses removed."""
    return _LOGIN.sub("", text)
