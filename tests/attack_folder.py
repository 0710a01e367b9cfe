"""Two servers on one folder, one of them killed under load: every answer is that of a cold server, bit for bit.

    python tests/attack_folder.py [--seed 1] [--kills 6] [--model FILE --words 150 --cache-bytes 100M]

A cold server gives the answers first: none of its requests shares a block with another. Then two servers with small
caches use one folder and are asked by several clients at a time. One server gets SIGKILL when it has answered some
requests, and is started again; a client whose answer was cut asks the other one. In the end both stop, and a last
server answers everything from the folder. Every file in the folder must have the bytes that an undisturbed server
writes under this name.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

from support import tiny_gguf
from support.serving import Served, serve
from support.tiers import files
from support.tiny_models import GOLDEN

WORDS = [f"{a}{b}{c}" for a in "bdfgklmnpr" for b in "aeiou" for c in "lmnrst"]
CONVERSATIONS, TURNS = 16, 3
CLIENTS = 3  # of each server
STEADY, KILLED = "steady", "killed"
WAIT = 120.0  # seconds without an event that fail the run


@dataclass(frozen=True)
class Scene:
    model: Path
    words: int  # that a turn adds to its conversation
    cache_bytes: str  # of each server
    kills: int
    seed: int

    def flags(self, folder: Path) -> tuple[str, ...]:
        return *self.cold_flags, "--disk-cache", str(folder), "--cache-bytes", self.cache_bytes

    @property
    def cold_flags(self) -> tuple[str, ...]:
        return "-np", "4", "-c", "2048", "-t", "1", "--backend", "cpu", "--cache", "paged"

    def bodies(self) -> list[dict[str, Any]]:
        """Conversations that begin alike, each turn longer than the one before. Every other answer is drawn."""
        rng = random.Random(self.seed)
        shared, found = rng.choices(WORDS, k=self.words), []
        for number in range(CONVERSATIONS):
            own = rng.choices(WORDS, k=TURNS * self.words)
            for turn in range(TURNS):
                prompt = " ".join([*shared, *own[: (turn + 1) * self.words]])
                drawn = {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0}
                found.append({"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "logprobs": 2, **drawn})
        return found


@dataclass
class Found:
    """What happened."""

    compared: int = 0  # answers
    wrong: list[str] = field(default_factory=list)
    cut: int = 0  # answers of clients that ended with their server
    streams_cut: int = 0  # one for each kill
    from_disk: Counter[str] = field(default_factory=Counter)  # tokens, by server
    files_before_end: int = 0  # in the folder, while both servers ran
    files: int = 0
    other_files: list[str] = field(default_factory=list)  # with other bytes than those of an undisturbed server
    drafts: int = 0  # unfinished files of killed servers
    exits: list[int] = field(default_factory=list)
    drops: float = 0  # blocks that the last server lost


def answer(server: Served, body: dict[str, Any]) -> tuple[Any, int]:
    """Text, tokens and log-probabilities; and how many tokens came from the folder."""
    reply = server.ask("/v1/completions", body)
    assert reply.status == 200, reply.body
    (choice,) = reply.json["choices"]
    fetched = reply.json["kvarn"].get("fetched") or {"disk": {"tokens": 0}}
    return [choice["text"], choice["logprobs"], choice["finish_reason"]], fetched["disk"]["tokens"]


class Load:
    """Clients of two servers. They ask until they are stopped, and compare every answer with the cold one."""

    def __init__(self, bodies: list[dict[str, Any]], cold: list[Any], found: Found) -> None:
        self._bodies, self._cold, self._found = bodies, cold, found
        self._servers: dict[str, Served] = {}
        self._changed = threading.Condition()
        self._answered: Counter[str] = Counter()
        self._stopped = False
        self._threads: list[threading.Thread] = []

    def start(self, seed: int, servers: dict[str, Served]) -> None:
        self._servers = dict(servers)
        for i in range(CLIENTS * len(servers)):
            name = sorted(servers)[i % len(servers)]
            self._threads.append(threading.Thread(target=self._run, args=(name, random.Random(f"{seed}/{i}"))))
            self._threads[-1].start()

    def kill(self, after: int) -> None:
        """End a server when it has answered so many more requests, in the middle of the next ones and of a stream."""
        with self._changed:
            goal = self._answered[KILLED] + after
            arrived = self._changed.wait_for(lambda: self._answered[KILLED] >= goal or self._found.wrong, WAIT)
            assert arrived, "the server that is to be killed does not answer"
            server = self._servers.pop(KILLED)
        with server.start({"prompt": "on and on", "max_tokens": 1500, "ignore_eos": True}) as stream:
            server.stop(signal.SIGKILL)
            try:
                stream.response.read()
            except (OSError, HTTPException):
                self._found.streams_cut += 1

    def replace(self, server: Served) -> None:
        with self._changed:
            self._servers[KILLED] = server
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self, name: str, rng: random.Random) -> None:
        try:
            while (server := self._server(name)) is not None:
                number = rng.randrange(len(self._bodies))
                try:
                    self._ask(name, server, number)
                except (OSError, HTTPException):
                    with self._changed:
                        if self._servers.get(name) is server:
                            raise
                        self._found.cut += 1
                    self._ask(STEADY, self._servers[STEADY], number)
        except Exception as error:  # noqa: BLE001 (of a thread: the run must fail)
            with self._changed:
                self._found.wrong.append(f"{name}: {type(error).__name__}: {error}")
                self._changed.notify_all()

    def _server(self, name: str) -> Served | None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._stopped or name in self._servers, WAIT), "no server is started"
            return None if self._stopped else self._servers[name]

    def _ask(self, name: str, server: Served, number: int) -> None:
        said, from_disk = answer(server, self._bodies[number])
        with self._changed:
            self._answered[name] += 1
            self._found.compared += 1
            self._found.from_disk[name] += from_disk
            if said != self._cold[number]:
                self._found.wrong.append(f"{name}: request {number}: {said}, cold {self._cold[number]}")
            self._changed.notify_all()


def play(scene: Scene, root: Path) -> Found:
    bodies, found, rng = scene.bodies(), Found(), random.Random(f"kills {scene.seed}")
    with serve(scene.model, *scene.cold_flags) as server:
        cold = [answer(server, body | {"cache_salt": str(i)})[0] for i, body in enumerate(bodies)]
        assert server.metric("kvarn:prefix_cache_hits_total") == 0, "the cold server has reused something"
    shared, alone = root / "shared", root / "alone"
    with ExitStack() as stack:

        def begin() -> Served:
            return stack.enter_context(serve(scene.model, *scene.flags(shared)))

        load, servers = Load(bodies, cold, found), {STEADY: begin(), KILLED: begin()}
        stack.callback(load.stop)
        load.start(scene.seed, servers)
        for _ in range(scene.kills):
            load.kill(rng.randrange(5, 25))
            servers[KILLED] = begin()
            load.replace(servers[KILLED])
        found.files_before_end = len(files(shared))
        load.stop()
        found.exits = [server.stop() for server in servers.values()]  # one after the other
    _ask_all(scene, shared, bodies, cold, found)
    _compare_files(scene, shared, alone, bodies, found)
    return found


def _ask_all(scene: Scene, folder: Path, bodies: list[dict[str, Any]], cold: list[Any], found: Found) -> None:
    with serve(scene.model, *scene.flags(folder)) as last:
        for number, body in enumerate(bodies):
            said, from_disk = answer(last, body)
            found.compared += 1
            found.from_disk["last"] += from_disk
            if said != cold[number]:
                found.wrong.append(f"last: request {number}: {said}, cold {cold[number]}")
        found.drops = last.metric("kvarn:kv_tier_drops_total", tier="disk")
        found.exits.append(last.stop())


def _compare_files(scene: Scene, shared: Path, alone: Path, bodies: list[dict[str, Any]], found: Found) -> None:
    with serve(scene.model, *scene.cold_flags, "--disk-cache", str(alone)) as server:
        for body in bodies * 2:  # what is seen twice is also written when it is evicted
            answer(server, body)
        assert server.stop() == 0
    expected = {path.name: path for path in files(alone)}
    found.files, found.drafts = len(files(shared)), len(list(shared.rglob(".*.part")))
    for path in files(shared):
        if path.name not in expected or path.read_bytes() != expected[path.name].read_bytes():
            found.other_files.append(path.name)


def slow_model(folder: Path) -> Path:
    """Its tokens take long to compute, and its cells are few: reading them is worth it."""
    size = replace(GOLDEN, hidden=512, feed_forward=3072, context=2048)
    return tiny_gguf.write(folder / "slow.gguf", "llama", tiny_gguf.CHAT, size)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--model", type=Path, help="default: a tiny one")
    parser.add_argument("--words", type=int, default=16, help="that each turn adds (default: 16)")
    parser.add_argument("--cache-bytes", default="1500K", help="of each server (default: 1500K)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ["KVARN_CACHE"] = str(root / "kvarn")  # stamps of weights
        model = args.model or slow_model(root)
        found = play(Scene(model, args.words, args.cache_bytes, args.kills, args.seed), root)
    for name, value in vars(found).items():
        print(f"{name:<18}{dict(value) if isinstance(value, Counter) else value}")
    ok = not (found.wrong or found.other_files or found.drops or any(found.exits)) and found.files > 0
    print("clean" if ok else "NOT CLEAN")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
