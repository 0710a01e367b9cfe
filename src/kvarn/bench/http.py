"""Plain requests to an OpenAI-compatible server: its address, its answers, and its error messages.

Non-goal: streams whose pieces are timed (load/client.py).
"""

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvarn.errors import KvarnError


class Address(NamedTuple):
    """Where a server is. `root` is the path in front of its endpoints, without /v1."""

    host: str
    port: int
    secure: bool
    root: str

    def __str__(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.authority}{self.root}"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(url: str) -> Address:
    """The address that http://HOST:PORT names, with or without /v1 at its end."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise KvarnError(f"{url!r} is not the URL of a server: give one like http://127.0.0.1:8000")
    secure = parts.scheme == "https"
    root = parts.path.rstrip("/").removesuffix("/v1")
    return Address(parts.hostname, port or (443 if secure else 80), secure, root)


def authorization(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def request(
    address: Address,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    api_key: str | None = None,
    timeout: float = 30.0,
) -> Iterator[bytes]:
    """The lines of the answer, as they arrive. Any status but 200 is raised with the server's own message."""
    kind = http.client.HTTPSConnection if address.secure else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=timeout)
    headers = {"Content-Type": "application/json", **authorization(api_key)}
    try:
        connection.request(method, address.root + path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            said = error_message(response.read(1 << 16)) or f"status {response.status} {response.reason}"
            hint = "; give the key with --api-key" if response.status == 401 else ""
            raise KvarnError(f"{address}{path} answered: {said}{hint}")
        yield from response
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or error or type(error).__name__
        raise KvarnError(f"{address} does not answer ({reason}): is the server running?") from None
    finally:
        connection.close()


def request_json(
    address: Address, method: str, path: str, body: Mapping[str, Any] | None = None, api_key: str | None = None
) -> Any:
    text = b"".join(request(address, method, path, body, api_key))
    try:
        return json.loads(text)
    except ValueError:
        raise KvarnError(f"{address}{path} answered something that is not JSON: is it the right server?") from None


def error_message(body: bytes) -> str:
    """What an error body says: its message if it has OpenAI's shape, otherwise its text, in one line."""
    try:
        said = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = body.decode("utf-8", "replace")
    return " ".join(said.split())[:500]
