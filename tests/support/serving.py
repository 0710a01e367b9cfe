"""A `kvarn serve` process on loopback, and plain HTTP to it."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

from support import tiny_gguf
from support.tiny_models import GOLDEN

MAIN = "import sys; from kvarn.cli import main; sys.exit(main())"


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return self.json["error"]["message"]

    @property
    def events(self) -> list[dict]:
        lines = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


class Pending:
    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection

    @cached_property
    def response(self) -> http.client.HTTPResponse:
        return self._connection.getresponse()

    def leave(self) -> None:
        """The socket is closed once both are: a response holds on to it."""
        if "response" in self.__dict__:
            self.response.close()
        self._connection.close()

    def __enter__(self) -> "Pending":
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()


class Served:
    def __init__(self, process: subprocess.Popen, summary: list[str]) -> None:
        self.process = process
        self.summary = summary
        last = summary[-1]
        self.url = (json.loads(last)["address"] if last.startswith("{") else last.split()[1]).removesuffix("/v1")
        self.host, _, port = self.url.removeprefix("http://").partition(":")
        self.port = int(port)

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=60)

    def ask(self, path: str, body: Any = None, key: str | None = None, method: str | None = None) -> Reply:
        raw = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        connection = self.connection()
        try:
            connection.request(method or ("GET" if raw is None else "POST"), path, raw, headers)
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def post(self, body: dict, key: str | None = None, path: str = "/v1/completions") -> "Pending":
        """A request whose answer is not waited for."""
        connection = self.connection()
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        connection.request("POST", path, json.dumps(body).encode(), headers)
        return Pending(connection)

    def start(self, body: dict, key: str | None = None) -> "Pending":
        """A stream whose first line has arrived."""
        pending = self.post(body | {"stream": True}, key)
        assert pending.response.status == 200, pending.response.read()
        pending.response.readline()
        return pending

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all samples of this name that have these labels."""
        found = []
        for line in self.ask("/metrics").body.decode().splitlines():
            if line.split("{")[0].split(" ")[0] == name and all(f'{k}="{v}"' in line for k, v in labels.items()):
                found.append(float(line.rsplit(" ", 1)[1]))
        return sum(found)

    def cache(self, key: str | None = None) -> dict:
        return self.ask("/kvarn/cache", key=key).json

    def until_idle(self) -> None:
        """Wait until no request runs or waits."""
        self.until(lambda: not self.metric("kvarn:num_requests_running") + self.metric("kvarn:num_requests_waiting"))

    def until(self, reached: Callable[[], object]) -> None:
        """Poll until it holds; fails after a minute."""
        end = time.monotonic() + 60
        while not reached():
            assert time.monotonic() < end, "it did not happen within a minute"
            time.sleep(0.01)

    def raw(self, sent: bytes = b"", source: str = "") -> socket.socket:
        """A plain connection that has sent these bytes."""
        connection = socket.create_connection((self.host, self.port), 60, (source, 0) if source else None)
        connection.sendall(sent)
        return connection

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


def closed(connection: socket.socket) -> bytes:
    """What arrives until the server closes the connection; fails after a minute."""
    received = b""
    with connection, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while piece := connection.recv(65536):
            received += piece
    return received


@contextlib.contextmanager
def serve(model: Path, *flags: str, files: int | None = None, log: Path | None = None) -> Iterator[Served]:
    """`files`: the limit of open files of the process. `log`: a file for its standard error, else it is a pipe that
    nobody reads. Without --log-format only warnings and errors are logged."""
    quiet = [] if "--log-format" in flags else ["--log-format", "none"]
    command = [sys.executable, "-c", MAIN, "serve", "-m", str(model), "--port", "0", *quiet, *flags]
    if files is not None:
        command = ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(files), *command]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        errors: Any = subprocess.PIPE
        if log is not None:
            errors = stack.enter_context(log.open("w"))
            written = stack.enter_context(log.open())
        process = subprocess.Popen(command, stderr=errors, text=True, env=environment)
        try:
            yield Served(process, read_summary(process, process.stderr or written))
        finally:
            process.kill()
            if process.stderr is None or process.stderr.closed:
                process.wait()
            else:
                process.communicate()


def read_summary(process: subprocess.Popen, errors: IO[str]) -> list[str]:
    lines: list[str] = []
    while not lines or not lines[-1].startswith(("address", '{"time')):
        line = errors.readline()
        if line:
            lines.append(line.rstrip("\n"))
        else:  # the end of a pipe, or of a file that grows
            assert process.stderr is None, f"no server: {''.join(lines)}"
            assert process.poll() is None, f"no server: {''.join(lines)}"
            time.sleep(0.01)
    return lines


def tiny_model(folder: Path, context: int = 2048) -> Path:
    return tiny_gguf.write(folder / "tiny.gguf", "llama", tiny_gguf.CHAT, replace(GOLDEN, context=context))
