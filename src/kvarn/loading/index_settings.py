"""Which package indexes the user has configured for pip and for uv, and how to reach them.

The environment comes first, then pip's configuration files, then uv's. No index is written down here:
if nothing is configured there are no indexes, and pip or uv use the default that they know.
Non-goals: find-links, keyrings, client certificates, configuration of projects (uv's tools ignore it, too).
"""

import configparser
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvarn.errors import KvarnError
from kvarn.loading.addresses import BadAddress, parsed
from kvarn.loading.paths import user_path

_TIMEOUT = 30.0  # seconds without a byte
_LONGEST_TIMEOUT = 86_400.0
_NAMED = re.compile(r"([A-Za-z0-9._-]+)=(.+)")  # uv: name=url
_CERTIFICATES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")  # pip takes them, too; Python itself takes SSL_CERT_FILE


@dataclass(frozen=True, slots=True)
class Indexes:
    urls: tuple[str, ...]  # may hold a user and a password
    trusted: frozenset[str]  # hosts, or host:port, whose certificates are not checked
    certificates: str | None  # a file; None: those of the system
    timeout: float
    unreadable: int = 0  # how many addresses are malformed; they are left out


def configured(environment: Mapping[str, str] = os.environ) -> Indexes:
    pip, uv = _pip(environment), _uv(environment)
    if pip.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        return Indexes((), frozenset(), None, _TIMEOUT)
    one = (
        environment.get("PIP_INDEX_URL"),
        environment.get("UV_DEFAULT_INDEX"),
        environment.get("UV_INDEX_URL"),
        pip.get("index-url"),
        *uv.default,
    )
    more = (
        pip.get("extra-index-url", ""),
        environment.get("UV_INDEX", ""),
        environment.get("UV_EXTRA_INDEX_URL", ""),
        *uv.extra,
    )
    first = next((text for text in one if text), None)
    found = [] if first is None else [first.strip()]
    found += [text for texts in more for text in texts.split()]
    addresses = [_address(text, environment) for text in found]
    given = (pip.get("cert"), *(environment.get(name) for name in _CERTIFICATES))
    return Indexes(
        urls=tuple(dict.fromkeys(url for url in addresses if url is not None)),
        trusted=frozenset(
            (*pip.get("trusted-host", "").split(), *environment.get("UV_INSECURE_HOST", "").split(), *uv.insecure)
        ),
        certificates=next((path for path in given if path), None),
        timeout=_seconds(pip.get("timeout") or environment.get("PIP_DEFAULT_TIMEOUT")),
        unreadable=addresses.count(None),
    )


def _seconds(text: str | None) -> float:
    try:
        seconds = float(text or "")
    except ValueError:
        return _TIMEOUT
    return seconds if 0 < seconds <= _LONGEST_TIMEOUT else _TIMEOUT


def _address(text: str, environment: Mapping[str, str]) -> str | None:
    """A URL: without uv's name, with the user and the password that uv has for the name. None if it is malformed."""
    named = _NAMED.fullmatch(text)
    name, url = (named[1], named[2]) if named and "://" not in named[1] else (None, text)
    try:
        if "://" not in url and not url.startswith("file:"):
            return user_path(url).absolute().as_uri()
        parts = parsed(url)
    except (BadAddress, KvarnError):
        return None
    if parts.fragment:  # a # in the password: the rest of the address is not one
        return None
    if name is None or "@" in parts.netloc:
        return url
    prefix = "UV_INDEX_" + re.sub(r"[^A-Z0-9]", "_", name.upper())
    user, password = environment.get(f"{prefix}_USERNAME"), environment.get(f"{prefix}_PASSWORD")
    if user is None and password is None:
        return url
    secret = f"{quote(user or '', safe='')}:{quote(password or '', safe='')}"
    return parts._replace(netloc=f"{secret}@{parts.netloc}").geturl()


def _pip(environment: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in _pip_files(environment):
        parser = configparser.RawConfigParser()
        with suppress(OSError, UnicodeDecodeError, configparser.Error):
            parser.read_string(path.read_text(encoding="utf-8"))
            for section in ("global", "download"):
                if parser.has_section(section):
                    found |= {key.replace("_", "-"): value for key, value in parser.items(section)}
    for key in ("extra-index-url", "trusted-host", "cert", "timeout", "no-index"):
        value = environment.get(f"PIP_{key.replace('-', '_').upper()}")
        if value:
            found[key] = value
    return found


def _pip_files(environment: Mapping[str, str]) -> list[Path]:
    """Later files win."""
    chosen = environment.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return []
    home, mac = Path.home(), sys.platform == "darwin"
    shared = [Path("/Library/Application Support")] if mac else _system_folders(environment)
    own = _user_folder(environment)
    if mac and (home / "Library/Application Support/pip").is_dir():
        own = home / "Library/Application Support"
    files = [folder / "pip/pip.conf" for folder in shared]
    files += [Path("/etc/pip.conf"), home / ".pip/pip.conf", own / "pip/pip.conf", Path(sys.prefix) / "pip.conf"]
    return [*files, *([Path(chosen)] if chosen else [])]


@dataclass(frozen=True, slots=True)
class _UvSettings:
    default: tuple[str, ...]
    extra: tuple[str, ...]
    insecure: tuple[str, ...]


def _uv(environment: Mapping[str, str]) -> _UvSettings:
    default: list[str] = []
    extra: list[str] = []
    insecure: list[str] = []
    for path in _uv_files(environment):
        settings: dict[str, Any] = {}
        with suppress(OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        pip = settings.get("pip")
        for table in (settings, pip if isinstance(pip, dict) else {}):
            for index in _tables(table.get("index")):
                if not index.get("explicit"):
                    name = f"{index['name']}=" if isinstance(index.get("name"), str) else ""
                    (default if index.get("default") else extra).append(f"{name}{index.get('url', '')}")
            default += _texts([table.get("index-url")])
            extra += _texts(table.get("extra-index-url"))
            insecure += _texts(table.get("allow-insecure-host"))
    return _UvSettings(tuple(default), tuple(extra), tuple(insecure))


def _uv_files(environment: Mapping[str, str]) -> list[Path]:
    """Earlier files win."""
    if environment.get("UV_NO_CONFIG", "").lower() in ("1", "true", "yes", "on"):
        return []
    if chosen := environment.get("UV_CONFIG_FILE"):
        return [Path(chosen)]
    shared = [folder / "uv/uv.toml" for folder in (*_system_folders(environment), Path("/etc"))]
    return [_user_folder(environment) / "uv/uv.toml", *[path for path in shared if path.is_file()][:1]]


def _user_folder(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _system_folders(environment: Mapping[str, str]) -> list[Path]:
    return [Path(text) for text in (environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":") if text]


def _tables(value: object) -> Iterable[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _texts(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str) and each] if isinstance(value, list) else []
