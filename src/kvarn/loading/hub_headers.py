"""Headers of model files on the hub, by range requests: no weights are downloaded.

A `RemoteFile` reads parts of one file. A server that ignores ranges sends a file from its start; then we
read as far as we need and close the connection, because headers come first in both formats. Nothing is kept
on disk. What a server says is not trusted: ranges, lengths and amounts are checked.
Non-goals: which files a model has (hub_offer.py); whole files (hub.py).
"""

import re
from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, build_opener

import numpy as np

from kvarn.arrays import Bytes
from kvarn.errors import BadModel, PullFailed, printable
from kvarn.loading.catalogue import HubModel
from kvarn.loading.checkpoint import Checkpoint, of_gguf, of_safetensors
from kvarn.loading.encodings import TensorInfo
from kvarn.loading.file_bytes import ByteSource
from kvarn.loading.gguf import GGUFFile
from kvarn.loading.hub_library import library, quiet_library, reason, remedy
from kvarn.loading.hub_offer import wanted
from kvarn.loading.progress import Progress
from kvarn.loading.safetensors import SafetensorsFolder, header_of

FIRST = 1 << 20  # bytes of the first request: the whole header of most safetensors files
MOST = 256 << 20  # bytes of one file that are read; the largest vocabularies take 20 MB
SECONDS = 30.0  # without a byte
_PIECE = 1 << 16
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_ANSWERS = {
    401: "its owner asks for a login: set HF_TOKEN",
    403: "its owner asks for a login: accept its terms on the hub's page and set HF_TOKEN",
    404: "the hub does not have it",
}


class RemoteFile:
    """A `ByteSource` over HTTP. `name` is for messages."""

    def __init__(self, url: str, headers: Mapping[str, str], name: str, progress: Progress) -> None:
        self._url, self._headers, self._name, self._progress = url, dict(headers), name, progress
        self.received = 0  # bytes of all answers
        self.size = 0
        self._head = self._ask(0, FIRST)

    def read(self, start: int, stop: int) -> Bytes:
        """The bytes from `start` to before `stop`, which must be inside the file."""
        if stop > len(self._head):
            head = self._head[start:]
            rest = self._ask(max(start, len(self._head)), stop)
            found = head + rest
            if start <= len(self._head):
                self._head += rest
        else:
            found = self._head[start:stop]
        if len(found) != stop - start:
            raise PullFailed(f"{self._name} could not be read: the answer ended too early; try again")
        return np.frombuffer(found, np.uint8)

    def _ask(self, start: int, stop: int) -> bytes:
        """At most these bytes; fewer only if the file is shorter."""
        if self.received + stop - start > MOST:
            raise BadModel(f"{self._name}: its header is longer than {MOST >> 20} MiB, which no model has")
        request = Request(self._url)
        for key, value in self._headers.items():
            secret = key.lower() == "authorization"  # it must not follow a redirect to another host
            (request.add_unredirected_header if secret else request.add_header)(key, value)
        request.add_header("Range", f"bytes={start}-{stop - 1}")
        request.add_header("Accept-Encoding", "identity")
        try:
            with closing(build_opener().open(request, timeout=SECONDS)) as answer:
                return self._take(answer, start, stop)
        except HTTPError as e:
            e.close()
            if e.code == 416 and not self.size:
                return b""  # an empty file
            raise PullFailed(f"{self._name} could not be read: {_ANSWERS.get(e.code, f'HTTP {e.code}')}") from None
        except (OSError, HTTPException, ValueError) as e:
            cause = e.reason if isinstance(e, URLError) else e
            why = printable(str(getattr(cause, "strerror", None) or cause or type(cause).__name__), 200)
            raise PullFailed(f"{self._name} could not be read ({why}); check the name and the network") from None

    def _take(self, answer: HTTPResponse, start: int, stop: int) -> bytes:
        skip = 0
        if answer.status == 206:
            given = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            if given is None or int(given[1]) != start or int(given[2]) >= int(given[3]):
                raise ValueError("the answer has another range than was asked for")
            size = int(given[3])
        else:  # the whole file, of which we read the beginning
            length = answer.headers.get("Content-Length", "")
            if not length.isdecimal():
                raise ValueError("the server does not say how long the file is")
            size, skip = int(length), start
            if self.received + min(stop, size) > MOST:
                raise ValueError("the server sends whole files only, and this one is too long; pull the model")
        if self.size not in (0, size):
            raise ValueError("the file has changed while it was read")
        self.size = size
        return self._receive(answer, skip, min(stop, size) - start)

    def _receive(self, answer: HTTPResponse, skip: int, n: int) -> bytes:
        found = bytearray()
        while len(found) < skip + n:
            piece = answer.read(min(_PIECE, skip + n - len(found)))
            if not piece:
                break
            found += piece
            self.received += len(piece)
            self._progress(f"reading the header of {self._name}", self.received, None)
        return bytes(found[skip:])


class _Repository:
    """The files of a folder on the hub, as `safetensors.Files`."""

    def __init__(self, hub: Any, repo: str, files: tuple[str, ...], progress: Progress) -> None:
        self.path = Path(f"hf:{repo}")
        self._hub, self._repo, self._files, self._progress = hub, repo, files, progress

    def has(self, name: str) -> bool:
        return name in self._files

    def text(self, name: str) -> bytes:
        file = self._open(name)
        return file.read(0, file.size).tobytes()

    def tensors(self, name: str) -> tuple[dict[str, TensorInfo], ByteSource]:
        if not self.has(name):
            raise BadModel(f"{self.path / name} is missing; the repository is not complete")
        file = self._open(name)
        return header_of(self.path / name, file), file

    def _open(self, name: str) -> RemoteFile:
        return opened(self._hub, self._repo, name, self._progress)


def opened(hub: Any, repo: str, file: str, progress: Progress) -> RemoteFile:
    headers = hub.utils.build_hf_headers()
    return RemoteFile(hub.hf_hub_url(repo, file), headers, f"hf:{repo}/{file}", progress)


def remote_checkpoint(model: HubModel, name: str, progress: Progress) -> Checkpoint:
    """The settings and tensors of a model on the hub. Its weights cannot be read. `name` is for messages."""
    hub = library(name)
    try:
        with quiet_library(hub):
            offer = wanted(hub, model)
    except PullFailed:
        raise
    except Exception as e:  # noqa: BLE001 (the library's errors have no other common base across versions)
        raise PullFailed(f"{name} could not be read ({reason(e)}); {remedy(e)}") from None
    repo, file = offer.model.repo, offer.model.file
    if file:
        return of_gguf(GGUFFile.of(Path(f"hf:{repo}/{file}"), opened(hub, repo, file, progress)))
    return of_safetensors(SafetensorsFolder.of(_Repository(hub, repo, offer.files, progress)))
