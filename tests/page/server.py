"""A `kvarn serve` process for the browser, and plain requests to it."""

import http.client
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KVARN = ROOT / ".venv" / "bin" / "kvarn"


class Server:
    """`port`: 0 takes a free one."""

    def __init__(self, folder: Path, *flags: str, model: str = "smollm2", port: int = 0) -> None:
        self._log = folder / f"log-{time.monotonic_ns()}"
        command = [str(KVARN), "serve", "-m", model, "--port", str(port), "--log-format", "json", *flags]
        with self._log.open("w") as errors:
            self.process = subprocess.Popen(command, stderr=errors, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
        started = self._started()
        self.address = started["address"].removesuffix("/v1")
        self.page = started.get("page", "").split(" ")[0]
        self.key = self.page.partition("#key=")[2]
        self.port = int(self.address.rsplit(":", 1)[1])

    def _started(self) -> dict[str, Any]:
        while self.process.poll() is None:
            for line in self._log.read_text().splitlines():
                if line.startswith('{"time"'):
                    return json.loads(line)
            time.sleep(0.05)
        raise RuntimeError(f"no server: {self._log.read_text()}")

    def log(self) -> str:
        return self._log.read_text()

    def ask(self, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        found = json.loads(response.read())
        connection.close()
        return response.status, found

    def chat(self, text: str, key: str | None = None, **fields: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 0} | fields
        status, found = self.ask("/v1/chat/completions", body, key)
        assert status == 200, found
        return found

    def watch(self, key: str | None = None) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/kvarn/live", headers={"Authorization": f"Bearer {key}"} if key else {})
        return connection, connection.getresponse()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.stop()
