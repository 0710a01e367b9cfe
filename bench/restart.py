"""Measures the time to the first token of a long conversation after a server's restart, over HTTP on loopback.

python bench/restart.py [--tokens 3000] [--times 3] [--llama-server PATH] [--json FILE] MODEL ...

A first server computes the history and stores it. Then a new server is started for every measurement, and gets the
history and a new question: without what was stored, with its files in the page cache, and with files that must be read
from the device. kvarn has a disk cache, and finds the text by itself. llama-server has `--slot-save-path`: the client
saves and restores a slot, and the time of the restore is counted. Not counted are loading the model and a first short
request, which touches its weights (llama-server makes one by itself). All ways take turns; times are medians. kvarn's
answers must be equal, token and log-probabilities.
"""

import argparse
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from kvarn.backends.pool import default_threads
from kvarn.bench.http import Address, request
from kvarn.bench.machine import Bandwidth, facts
from kvarn.errors import KvarnError
from kvarn.loading.gguf import GGUFFile
from kvarn.loading.pull import resolve
from kvarn.text.tokenizer import Tokenizer

QUESTION = "\nNow answer in one word: what was this text about?"
COMPUTED, PAGE_CACHE, DISK = WAYS = ("computed", "page cache", "disk")
CONTEXT, THREADS = "4096", str(default_threads())
START, ANSWER = 120.0, 900.0  # seconds that a server may take
Run = dict[str, Any]


class Engine(Protocol):
    name: str

    def command(self, model: Path, port: int, folder: Path | None) -> list[str]: ...

    def keep(self, address: Address) -> None:
        """After the history was computed: store it, if the client has to ask for it."""

    def bring_back(self, address: Address) -> None:
        """Before the question: restore the history, if the client has to ask for it."""


class Kvarn:
    name = "kvarn"

    def command(self, model: Path, port: int, folder: Path | None) -> list[str]:
        main = [sys.executable, "-c", "import sys; from kvarn.cli import main; sys.exit(main())"]
        flags = ["--port", str(port), "--cache", "paged", "-c", CONTEXT, "-np", "1", "-t", THREADS, "--backend", "cpu"]
        tier = [] if folder is None else ["--disk-cache", str(folder)]
        return [*main, "serve", "-m", str(model), "--log-format", "none", *flags, *tier]

    def keep(self, address: Address) -> None:
        pass

    def bring_back(self, address: Address) -> None:
        pass


class LlamaServer:
    name = "llama-server"
    slot = "/slots/0?action="

    def __init__(self, program: Path) -> None:
        self._program = program.absolute()

    def version(self) -> str:
        said = subprocess.run([str(self._program), "--version"], capture_output=True, text=True, check=True)
        return next(line for line in (said.stderr + said.stdout).splitlines() if line.startswith("version"))

    def command(self, model: Path, port: int, folder: Path | None) -> list[str]:
        flags = ["--host", "127.0.0.1", "--port", str(port), "-c", CONTEXT, "-np", "1", "-t", THREADS, "--offline"]
        saved = [] if folder is None else ["--slot-save-path", str(folder)]
        return [str(self._program), "-m", str(model), *flags, *saved]

    def keep(self, address: Address) -> None:
        b"".join(request(address, "POST", f"{self.slot}save", {"filename": "history"}, timeout=ANSWER))

    def bring_back(self, address: Address) -> None:
        b"".join(request(address, "POST", f"{self.slot}restore", {"filename": "history"}, timeout=ANSWER))


@contextmanager
def running(engine: Engine, model: Path, folder: Path | None) -> Iterator[Address]:
    """A server that is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", free.getsockname()[1], False, "")
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(engine.command(model, address.port, folder), stdout=log, stderr=log)
        try:
            _wait_for(engine, process, address, log)
            yield address
        finally:
            process.terminate()
            process.wait(START)


def _wait_for(engine: Engine, process: subprocess.Popen[bytes], address: Address, log: Any) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end:
        if process.poll() is not None:
            log.seek(0)
            raise KvarnError(f"{engine.name} ended: {' '.join(log.read().split())[-500:]}")
        with suppress(KvarnError):
            b"".join(request(address, "GET", "/health"))
            return
        time.sleep(0.05)
    raise KvarnError(f"{engine.name} was not ready after {START:.0f} s")


def history(tokenizer: Tokenizer, n_tokens: int) -> list[int]:
    tokens: list[int] = []
    for i in itertools.count():
        tokens += tokenizer.encode(f"Note {i}: visitor {i * 37 % 101} asked for room {i * 53 % 97}.")
        if len(tokens) >= n_tokens:
            break
    return tokens[:n_tokens]


def first_token(engine: Engine, address: Address, prompt: Sequence[int], restore: bool) -> Run:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 3, "stream": True}
    body |= {"model": "any", "ignore_eos": True, "stream_options": {"include_usage": True}}
    start, first, answer, usage = time.perf_counter(), 0.0, [], {}
    if restore:
        engine.bring_back(address)
    for line in request(address, "POST", "/v1/completions", body, timeout=ANSWER):
        if not line.startswith(b"data:") or b"[DONE]" in line:
            continue
        piece = json.loads(line[5:])
        for choice in piece.get("choices", ()):
            if choice.get("text") or choice.get("logprobs"):  # the text of a control token is empty
                first = first or time.perf_counter()
                answer.append([choice["text"], choice.get("logprobs")])
        usage = piece.get("usage") or usage
    if not first:
        raise KvarnError(f"{engine.name} answered nothing")
    reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return {"seconds": round(first - start, 4), "reused_tokens": reused, "answer": answer}


def forget_pages(folder: Path) -> None:
    """Write the files to the device and drop them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def one(engine: Engine, model: Path, prompt: Sequence[int], stored: Path, way: str) -> Run:
    with tempfile.TemporaryDirectory() as folder:  # a run stores the question, too
        copy = Path(folder)
        if way != COMPUTED:
            shutil.copytree(stored, copy, dirs_exist_ok=True)
        if way == DISK:
            forget_pages(copy)
        with running(engine, model, None if way == COMPUTED else copy) as address:
            first_token(engine, address, prompt[-8:], False)
            return first_token(engine, address, prompt, way != COMPUTED)


def measure(model: Path, engines: Sequence[Engine], n_tokens: int, times: int) -> dict[str, Any]:
    tokenizer = Tokenizer.from_gguf(dict(GGUFFile.open(model).metadata))
    told = history(tokenizer, n_tokens)
    prompt = told + tokenizer.encode(QUESTION)
    runs: dict[str, dict[str, list[Run]]] = {engine.name: {way: [] for way in WAYS} for engine in engines}
    sizes = {}
    with tempfile.TemporaryDirectory() as root:
        for engine in engines:
            folder = Path(root, engine.name)
            folder.mkdir()
            with running(engine, model, folder) as address:
                first_token(engine, address, told, False)
                engine.keep(address)
            sizes[engine.name] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        for _, way, engine in itertools.product(range(times), WAYS, engines):
            runs[engine.name][way].append(one(engine, model, prompt, Path(root, engine.name), way))
            print(f"  {engine.name:<13} {way:<11} {runs[engine.name][way][-1]['seconds']:>8.3f} s", flush=True)
    return {"model": model.name, "prompt_tokens": len(prompt)} | {
        engine.name: summary(runs[engine.name], sizes[engine.name], engine.name == Kvarn.name) for engine in engines
    }


def summary(runs: dict[str, list[Run]], nbytes: int, exact: bool) -> dict[str, Any]:
    answers = {json.dumps(run.pop("answer")) for found in runs.values() for run in found}
    if exact and len(answers) > 1:
        raise KvarnError(f"kvarn's answers differ: {answers}")
    middle = {way: round(median(run["seconds"] for run in found), 4) for way, found in runs.items()}
    faster = {way: round(middle[COMPUTED] / middle[way], 1) for way in WAYS[1:]}
    return {
        "stored_bytes": nbytes,
        "seconds": middle,
        "faster": faster,
        "different_answers": len(answers),
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a GGUF file, or a name that kvarn pulls")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--times", type=int, default=3, help="measurements of each way (default: 3)")
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="llama.cpp's server, to compare with")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    engines: list[Engine] = [Kvarn()]
    versions = {}
    if args.llama_server is not None:
        engines.append(llama := LlamaServer(args.llama_server))
        versions[llama.name] = llama.version()
    rows = []
    for model in map(resolve, args.models):
        print(model.name, flush=True)
        rows.append(measure(model, engines, args.tokens, args.times))
        for engine in engines:
            found = rows[-1][engine.name]
            times = "  ".join(f"{way} {found['seconds'][way]:.3f} s" for way in WAYS)
            print(f"{engine.name:<13} {found['stored_bytes'] / 1e6:>6.0f} MB  {times}  {found['faster']}", flush=True)
    if args.json:
        command = " ".join(["python", "bench/restart.py", *(Path(word).name for word in sys.argv[1:])])
        machine = facts(Bandwidth(default_threads()))
        whole = {"command": command, "tokens": args.tokens, "machine": machine, **versions, "models": rows}
        Path(args.json).write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KvarnError as error:
        sys.exit(f"restart.py: {error}")
