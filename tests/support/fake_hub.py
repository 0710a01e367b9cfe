"""A Hugging Face hub on loopback: the few endpoints that huggingface_hub asks when it downloads models.

The real library talks to it: set HF_ENDPOINT to `url`. Files are large-file ones, with a SHA-256.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

PIECE = 1 << 16
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    def __init__(self, repos: dict[str, dict[str, bytes]], licence: str | None = "apache-2.0") -> None:
        self.repos = repos
        self.licence = licence
        self.lies: dict[str, str] = {}  # file: the SHA-256 that the hub claims
        self.cut: dict[str, int] = {}  # file: the first download of it ends after so many bytes
        self.ranges = "rest"  # what a range gets: the `rest` of the file, `exact`ly it, or the `whole` file
        self.sent = 0  # bytes of files
        self.logins: list[str | None] = []  # the Authorization of requests for files
        self.asked: list[str] = []  # method, path, and the range if there is one
        self.url = ""

    def info(self, repo: str) -> dict[str, object]:
        siblings = [
            {
                "rfilename": file,
                "size": len(content),
                "blobId": "b" * 40,
                "lfs": {"size": len(content), "sha256": self.digest(file, content), "pointerSize": 134},
            }
            for file, content in self.repos[repo].items()
        ]
        card = {} if self.licence is None else {"license": self.licence}
        return {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "cardData": card, "tags": []}

    def tree(self, repo: str) -> list[dict[str, object]]:
        return [
            {
                "type": "file",
                "path": file,
                "size": len(content),
                "oid": "b" * 40,
                "lfs": {"oid": self.digest(file, content), "size": len(content), "pointerSize": 134},
            }
            for file, content in self.repos[repo].items()
        ]

    def digest(self, file: str, content: bytes) -> str:
        return self.lies.get(file) or sha256(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.asked.append(" ".join(filter(None, (self.command, path, self.headers.get("Range")))))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.answer_api("/".join(parts[2:4]), parts[4:5])
        elif parts[2:4] == ["resolve", "main"] or parts[2:4] == ["resolve", COMMIT]:
            self.answer_file("/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self.refuse("EntryNotFound")

    do_HEAD = do_GET

    def answer_api(self, repo: str, what: list[str]) -> None:
        if repo not in self.hub.repos:
            self.refuse("RepoNotFound")
            return
        body = json.dumps(self.hub.tree(repo) if what == ["tree"] else self.hub.info(repo)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer_file(self, repo: str, file: str) -> None:
        content = self.hub.repos.get(repo, {}).get(file)
        if content is None:
            self.refuse("EntryNotFound")
            return
        self.hub.logins.append(self.headers.get("Authorization"))
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start = 0 if self.hub.ranges == "whole" else int(first)
        end = min(int(last) + 1, len(content)) if self.hub.ranges == "exact" and last else len(content)
        partial = start > 0 or (self.hub.ranges == "exact" and "Range" in self.headers and bool(content))
        self.send_response(206 if partial else 200)
        self.send_header("Content-Length", str(end - start))
        if partial:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("ETag", f'"{self.hub.digest(file, content)}"')
        self.end_headers()
        if self.command == "GET":
            stop = self.hub.cut.pop(file, None)
            self.send(content[start : end if stop is None else stop])
            if stop is not None:
                self.close_connection = True

    def send(self, content: bytes) -> None:
        """In pieces, and as long as the client reads."""
        with suppress(ConnectionError):
            for at in range(0, len(content), PIECE):
                self.wfile.write(content[at : at + PIECE])
                self.hub.sent += len(content[at : at + PIECE])

    def refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
