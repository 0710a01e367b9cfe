"""Headers of models on the hub: what is read, what is not, and what a hostile server can do."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from support.fake_hub import FakeHub, running
from support.tiny_files import write_hf
from support.tiny_gguf import write

from kvarn.errors import BadModel, PullFailed
from kvarn.loading import hub_headers
from kvarn.loading.checkpoint import Checkpoint, of_gguf, open_checkpoint
from kvarn.loading.gguf import GGUFFile
from kvarn.loading.hub_headers import RemoteFile
from kvarn.loading.progress import quiet

WEIGHTS = 8 << 20  # bytes after the header, which nobody should ask for
HEADERS = """
import json, sys
from kvarn.loading.headers import open_headers
from kvarn.errors import KvarnError
found = []
for name in sys.argv[1:]:
    try:
        checkpoint = open_headers(name, lambda *each: None, print)
        found.append([checkpoint.config.architecture, sorted((i.name, i.type, i.shape) for i in checkpoint.infos)])
    except KvarnError as error:
        found.append(str(error))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("models")
    gguf = write(folder / "tiny-F32.gguf", "llama-llama3").read_bytes()
    hf = write_hf(folder / "hf", "qwen2", shards=2)
    files = {path.name: path.read_bytes() for path in hf.iterdir()}
    damaged = {**files, next(name for name in files if name.endswith(".safetensors")): b"\xff" * 100}
    return {"o/gguf": {"tiny-F32.gguf": gguf + bytes(WEIGHTS)}, "o/hf": files, "o/damaged": damaged}


def said(folder: Path, hub: FakeHub, *names: str) -> list:
    """With the real library, which reads its settings when it is imported."""
    environment = {"HF_HOME": str(folder / "hf"), "KVARN_CACHE": str(folder / "kvarn"), "HF_ENDPOINT": hub.url}
    done = subprocess.run(
        [sys.executable, "-c", HEADERS, *names],
        env=os.environ | environment | {"HF_HUB_DISABLE_TELEMETRY": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def facts_of(checkpoint: Checkpoint) -> list:
    infos = sorted((info.name, info.type, list(info.shape)) for info in checkpoint.infos)
    return [checkpoint.config.architecture, [list(each) for each in infos]]


@pytest.mark.parametrize("ranges", ["exact", "whole"])
def test_a_header_is_read_and_weights_are_not(tmp_path: Path, repos: dict, ranges: str) -> None:
    local = tmp_path / "local.gguf"
    local.write_bytes(repos["o/gguf"]["tiny-F32.gguf"])
    folder = tmp_path / "local"
    folder.mkdir()
    for name, content in repos["o/hf"].items():
        (folder / name).write_bytes(content)
    with running(FakeHub(repos)) as hub:
        hub.ranges = ranges
        gguf, hf, none, no_file, damaged = said(
            tmp_path, hub, "hf:o/gguf:F32", "hf:o/hf", "hf:o/none", "hf:o/gguf/other.gguf", "hf:o/damaged"
        )
    assert gguf == facts_of(open_checkpoint(local))
    assert hf == facts_of(open_checkpoint(folder))
    assert "could not be read (the hub has no such repository, or hides it); check the name" in none
    assert "has no file other.gguf" in no_file
    assert "is damaged: its header would have" in damaged
    assert not (tmp_path / "hf" / "hub").exists(), "nothing is kept"
    if ranges == "exact":
        assert hub.sent < WEIGHTS, "of 8 MB of weights, those next to the header at the most"
        assert all("bytes=" in line for line in hub.asked if "/resolve/" in line)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    content = bytes(range(256)) * 16384  # 4 MiB
    with running(FakeHub({"o/r": {"f": content, "empty": b""}})) as hub:
        yield hub


def remote(hub: FakeHub, file: str = "f") -> RemoteFile:
    return RemoteFile(f"{hub.url}/o/r/resolve/main/{file}", {}, "hf:o/r/f", quiet)


@pytest.mark.parametrize("ranges", ["exact", "whole", "rest"])
def test_any_part_of_a_file(hub: FakeHub, ranges: str) -> None:
    hub.ranges = ranges
    content = np.frombuffer(hub.repos["o/r"]["f"], np.uint8)
    file = remote(hub)
    assert file.size == len(content)
    for start, stop in ((0, 8), (5, 1 << 20), (1 << 20, (1 << 20) + 9), (100, 2_000_000), (4_000_000, 4 << 20)):
        assert (file.read(start, stop) == content[start:stop]).all()


def test_a_secret_stays_with_its_host(hub: FakeHub) -> None:
    """The hub redirects to other hosts. They get the range, and not the login."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.headers.get("Authorization"), self.headers.get("Range")))
            self.send_response(302)
            self.send_header("Location", f"{hub.url}/o/r/resolve/main/f")
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    hub.ranges = "exact"
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            secret = {"authorization": "Bearer secret", "user-agent": "me"}
            file = RemoteFile(f"http://127.0.0.1:{server.server_port}/f", secret, "f", quiet)
        finally:
            server.shutdown()
            thread.join()
    assert file.size == 4 << 20
    assert seen == [("Bearer secret", "bytes=0-1048575")]
    assert hub.asked[-1].endswith("bytes=0-1048575")
    assert hub.logins == [None]


def test_servers_that_lie(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.ranges = "exact"
    hub.cut["f"] = 1000
    file = remote(hub)
    assert file.read(0, 1 << 20).tobytes() == hub.repos["o/r"]["f"][: 1 << 20], "an answer that ends early is continued"
    hub.repos["o/r"]["f"] = b"other"
    with pytest.raises(PullFailed, match="could not be read"):
        file.read(2 << 20, 3 << 20)
    assert remote(hub, "empty").size == 0
    with pytest.raises(PullFailed, match="the hub does not have it"):
        remote(hub, "none")
    with pytest.raises(PullFailed, match="check the name and the network"):
        RemoteFile("http://127.0.0.1:9/f", {}, "f", quiet)


@pytest.mark.parametrize("ranges", ["exact", "whole"])
def test_a_header_without_end_is_refused(hub: FakeHub, ranges: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.ranges = ranges
    monkeypatch.setattr(hub_headers, "MOST", 3 << 20)
    with pytest.raises((BadModel, PullFailed), match=r"longer than 3 MiB|whole files only"):
        remote(hub).read(0, 4 << 20)


def test_only_the_header(tmp_path: Path, hub: FakeHub) -> None:
    hub.ranges = "exact"
    hub.repos["o/r"]["f"] = write(tmp_path / "tiny.gguf", "qwen3").read_bytes()
    checkpoint = of_gguf(GGUFFile.of(Path("hf:o/r/f"), remote(hub)))
    with pytest.raises(BadModel, match="only the header of hf:o/r/f was read; pull the model"):
        checkpoint.in_file("token_embd.weight")
