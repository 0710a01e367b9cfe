"""Peers are the engines that a benchmark compares kvarn with: llama-cpp-python, or a server with OpenAI's API."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvarn.bench.case import Case, Subject
from kvarn.bench.peers.llamacpp import LlamaCpp
from kvarn.bench.peers.server import Server
from kvarn.errors import KvarnError
from kvarn.loading.pull import resolve

LLAMA_CPP = "llama-cpp-python"
PYTHON = "KVARN_PEER_PYTHON"  # environment variable: the Python interpreter in which llama-cpp-python is installed


@contextmanager
def connect(
    against: str | None,
    python: str | None,
    model: str,
    vocab_size: int,
    threads: int,
    chunk: int,
    cases: Sequence[Case],
) -> Iterator[Subject | None]:
    if against is None:
        yield None
        return
    peer: LlamaCpp | Server
    if against == LLAMA_CPP:
        path = resolve(model)
        if path.suffix != ".gguf":
            raise KvarnError(f"{LLAMA_CPP} reads only .gguf files, and {path.name} is not one")
        peer = LlamaCpp(python or os.environ.get(PYTHON) or sys.executable, path, threads, chunk, cases)
    elif "://" in against:
        peer = Server(against, vocab_size, max(case.context for case in cases))
    else:
        raise KvarnError(f"--against {against!r}: give the URL of a server, {LLAMA_CPP}, or a .json file with speeds")
    try:
        yield peer
    finally:
        peer.close()
