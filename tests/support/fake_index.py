"""A package index on loopback, with one project that has one wheel."""

import io
import json
import random
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

MODEL = b"GGUF" + random.Random(3).randbytes(3 << 20)
PACKED = io.BytesIO()
with zipfile.ZipFile(PACKED, "w") as archive:
    archive.writestr(
        zipfile.ZipInfo("tiny_model/tiny.gguf"), MODEL
    )  # with a fixed time, so that its digest is fixed, too
WHEEL = PACKED.getvalue()
FILE = "tiny_model-1.0-py3-none-any.whl"
DIGEST = sha256(WHEEL).hexdigest()
JSON, HTML = "application/vnd.pypi.simple.v1+json", "text/html"
OTHER_FILES = (
    "tiny_model-1.0.tar.gz",
    "tiny_model-1.1-py3-none-any.whl",
    "tiny_model-1.0-cp311-cp311-linux_x86_64.whl",
)


def page(kind: str, digest: str | None = DIGEST, url: str = f"../../files/{FILE}") -> bytes:
    if kind == JSON:
        hashes = {} if digest is None else {"sha256": digest}
        files = [{"filename": name, "url": name, "hashes": {}} for name in OTHER_FILES]
        return json.dumps({"files": [*files, {"filename": FILE, "url": url, "hashes": hashes}]}).encode()
    links = "".join(f'<a href="{name}">{name}</a>' for name in OTHER_FILES)
    tail = "" if digest is None else f"#sha256={digest}"
    return f'<!DOCTYPE html><html><body>{links}<a href="{url}{tail}">{FILE}</a></body></html>'.encode()


class Server:
    """An index on loopback. `pages` and `files` are what it has; a str instead of bytes is a redirect."""

    def __init__(self) -> None:
        self.kind = JSON
        self.pages: dict[str, bytes | str] = {"/simple/tiny-model/": page(JSON), f"/files/{FILE}": WHEEL}
        self.claims: int | None = None  # a Content-Length that is not true
        self.wants: str | None = None  # the Authorization that it asks for
        self.seen: list[tuple[str, str | None, str | None]] = []  # path, Authorization, Accept
        self.port = 0

    def url(self, host: str = "127.0.0.1", user: str = "") -> str:
        return f"http://{user}{host}:{self.port}/simple"


@contextmanager
def running() -> Iterator[Server]:
    ours = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            said = self.headers.get("Authorization")
            ours.seen.append((self.path, said, self.headers.get("Accept")))
            body = ours.pages.get(self.path)
            if ours.wants is not None and said != ours.wants:
                self.send_error(401)
            elif body is None:
                self.send_error(404)
            elif isinstance(body, str):
                self.send_response(302)
                self.send_header("Location", body)
                self.end_headers()
            else:
                self.send_response(200)
                self.send_header("Content-Type", ours.kind)
                self.send_header("Content-Length", str(ours.claims or len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        ours.port = http.server_port
        http.handle_error = lambda *client: None  # one test hangs up
        thread = Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        yield ours
        http.shutdown()
        thread.join()
