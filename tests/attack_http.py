"""Attack: a server in a child process under everything that a client without manners can do. `make attack`.

After every attack the server is healthy, an honest client gets the same answers as at the start, nothing is
held, and the log has no traceback. The first fault ends it with status 1.
"""

import argparse
import contextlib
import json
import random
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.hostile_http import CHAT, ODDITIES, STREAMED, TEXT, VALID, hostile_bodies, mutated, request, said, statuses
from support.serving import Served, serve, tiny_model

KEY = "k"
AUTHORIZED = f"Authorization: Bearer {KEY}"
LONG = VALID[TEXT] | {"prompt": "abcdefgh" * 6, "max_tokens": 400, "ignore_eos": True}
FLAGS = ("--api-key", KEY, "--queue", "16", "-np", "4", "--chunk", "32", "--cache-bytes", "512K", "-c", "512")
FLAGS += ("--head-seconds", "2", "--reader-seconds", "2", "--max-connections", "300", "--allowed-host", "localhost")
FINE = {200, 400, 401, 403, 404, 405, 408, 413, 429, 503}
LOG_BYTES = 64 << 10
GROWTH = 200 << 20  # bytes of memory


class Attack:
    def __init__(self, server: Served, rng: random.Random, scale: float) -> None:
        self.server = server
        self.rng = rng
        self.outcomes: Counter[str] = Counter()
        self._scale = scale
        self._log: list[str] = []
        self._reader = threading.Thread(target=lambda: self._log.extend(server.process.stderr), daemon=True)
        self._reader.start()
        self._answers = self.honest()
        self._files, self._memory = self.files(), self.memory()

    # -- what must hold ------------------------------------------------------------------------------------------

    def honest(self) -> list[object]:
        answers: list[object] = []
        for path, body in VALID.items():
            reply = self.server.ask(path, body, KEY)
            assert reply.status == 200, f"an honest client gets {reply.status} from {path}"
            answers.append(said(reply.json))
        stream = self.server.ask(CHAT, VALID[CHAT] | {"stream": True}, KEY).events
        answers.append("".join(c["delta"].get("content") or "" for event in stream for c in event["choices"]))
        return answers

    def check(self) -> None:
        self.server.until_idle()
        assert self.server.ask("/health").status == 200
        assert self.honest() == self._answers, "the answers of an honest client have changed"
        cache = self.server.cache(KEY)
        assert (cache["sequences"], cache["blocks"]["used"]) == (0, 0), "blocks are held"
        log = "".join(self._log)
        assert "Traceback" not in log, log[-3000:]
        assert len(log) < LOG_BYTES, f"the log has {len(log)} bytes: {log[-1000:]}"
        self.server.until(lambda: self.files() <= self._files + 2)
        self.server.until(lambda: self.memory() < self._memory + GROWTH)

    def files(self) -> int:
        folder = Path(f"/proc/{self.server.process.pid}/fd")
        return len(list(folder.iterdir())) if folder.exists() else 0

    def memory(self) -> float:
        return self.server.metric("process_resident_memory_bytes")

    def end(self) -> None:
        self._reader.join(60)

    # -- tools ---------------------------------------------------------------------------------------------------

    def times(self, n: int) -> int:
        return max(int(n * self._scale), 1)

    def send(self, sent: bytes, how: str = "half-close") -> bytes:
        """Send, then close the sending side and read everything, or leave at once."""
        with self.server.raw() as connection, contextlib.suppress(ConnectionError):
            connection.settimeout(60)
            connection.sendall(sent)
            if how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if how != "half-close":
                return b""
            connection.shutdown(socket.SHUT_WR)
            received = b""
            while piece := connection.recv(65536):
                received += piece
            return received
        return b""

    def note(self, what: str, received: bytes) -> None:
        found = statuses(received)
        assert set(found) <= FINE, f"{what}: {found}, {received[-300:]!r}"
        self.outcomes.update(f"{what} {status}" for status in found or ["closed"])

    def together(self, what: str, n: int, sent: Callable[[random.Random], tuple[bytes, str]]) -> None:
        """n connections, up to 32 at a time."""
        own = [random.Random(self.rng.random()) for _ in range(n)]
        with ThreadPoolExecutor(32) as pool:
            for received in pool.map(lambda rng: self.send(*sent(rng)), own):
                self.note(what, received)

    # -- attacks -------------------------------------------------------------------------------------------------

    def oddities(self) -> None:
        """Each as it is, and with random changes."""
        for sent, _ in ODDITIES.values():
            self.note("oddity", self.send(sent))
        for late in (
            b"zz\r\n",
            b"-1\r\n",
            b"\0" * 100,
            b"1" * 100_000,
        ):  # after an answer that did not wait for the body
            head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            with self.server.raw(head) as connection, contextlib.suppress(ConnectionError):
                answer = b""
                while b"ok" not in answer:
                    answer += connection.recv(65536)
                self.note("late", answer)
                connection.sendall(late)
                assert connection.recv(65536) == b"", "a second answer"
        odd = [sent for sent, _ in ODDITIES.values() if sent]
        self.together("changed oddity", self.times(200), lambda rng: (mutated(rng, rng.choice(odd)), "half-close"))

    def bodies(self) -> None:
        for path in VALID:
            bodies = list(hostile_bodies(path))
            for body in self.rng.sample(bodies, min(self.times(300), len(bodies))):
                self.note("body", self.send(request(path, body, AUTHORIZED)))

    def mutations(self) -> None:
        def one(rng: random.Random) -> tuple[bytes, str]:
            path = rng.choice(list(VALID))
            body = json.dumps(VALID[path] | {"stream": rng.random() < 0.3} if path in STREAMED else VALID[path])
            sent = request(path, body.encode(), AUTHORIZED) * rng.choice([1, 1, 3])
            return mutated(rng, sent), rng.choice(["half-close", "half-close", "close", "reset"])

        self.together("mutation", self.times(600), one)

    def flood(self) -> None:
        long = request(TEXT, json.dumps(LONG).encode(), AUTHORIZED)
        self.together("flood", self.times(100), lambda rng: (long, "half-close"))

    def leaving(self) -> None:
        """Clients that leave or reset while their request is read, waits or is answered."""

        def one(rng: random.Random) -> tuple[bytes, str]:
            body = json.dumps(LONG | {"stream": rng.random() < 0.5, "n": rng.choice([1, 4])}).encode()
            sent = request(TEXT, body, AUTHORIZED)
            return sent[: rng.choice([len(sent), len(sent), rng.randrange(len(sent))])], rng.choice(["close", "reset"])

        self.together("left", self.times(300), one)

    def unread(self) -> None:
        """Streams, and many answers to pipelined requests, that nobody reads."""
        stream = request(TEXT, json.dumps(LONG | {"stream": True, "logprobs": 5}).encode(), AUTHORIZED)
        metrics = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200
        with contextlib.ExitStack() as stay:
            for _ in range(min(self.times(10), 12)):  # the queue has room for the honest client
                for sent in (stream, metrics):
                    connection = stay.enter_context(socket.socket())
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    connection.connect((self.server.host, self.server.port))
                    connection.sendall(sent)
            assert self.honest() == self._answers
        self.outcomes["unread"] += 2 * min(self.times(10), 12)

    def silence(self) -> None:
        """More connections than allowed that send nothing, half a head or half a body, some byte by byte."""
        heads = [b"", b"G", b"GET /health HTTP/1.1\r\nX: ", request(TEXT, b"x" * 100_000, AUTHORIZED)[:-10]]
        with contextlib.ExitStack() as stay:
            open_ = [stay.enter_context(self.server.raw(self.rng.choice(heads))) for _ in range(self.times(600))]
            for connection in self.rng.sample(open_, len(open_) // 4):
                with contextlib.suppress(OSError):
                    connection.send(b"x")
            assert self.honest() == self._answers
        self.outcomes["silent"] += self.times(600)

    def large(self) -> None:
        filler = b'{"metadata": [' + b'{"a": "abcdefghijklmnopqrstuvwx"},' * 220_000 + b"1]}"
        texts = [filler, b'{"prompt": "' + b"a" * 8_000_000 + b'"}', b"[" * 8_000_000, b'"' + b"\\u" * 4_000_000]
        for body in texts:
            self.note("large body", self.send(request(self.rng.choice(list(VALID)), body, AUTHORIZED)))


ATTACKS = ("oddities", "bodies", "mutations", "flood", "leaving", "unread", "silence", "large")


def main() -> int:
    parser = argparse.ArgumentParser(description="attack a server over HTTP")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--scale", type=float, default=1.0, help="size of each attack")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder, serve(tiny_model(Path(folder), 512), *FLAGS) as server:
        attack = Attack(server, rng, args.scale)
        where = "the start"
        try:
            for i in range(args.rounds):
                for name in rng.sample(ATTACKS, len(ATTACKS)):
                    where, start = f"round {i}, {name}", time.monotonic()
                    getattr(attack, name)()
                    attack.check()
                    print(f"{where}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
            where = "the end"
            assert server.stop() == 0
            attack.end()
        except (AssertionError, OSError) as error:
            print(f"FAULT with --seed {args.seed} in {where}: {error or type(error).__name__}")
            server.process.kill()
            attack.end()
            return 1
    for outcome, n in sorted(attack.outcomes.items()):
        print(f"{outcome:<20} {n}")
    print("clean")
    return 0


if __name__ == "__main__":
    sys.exit(main())
