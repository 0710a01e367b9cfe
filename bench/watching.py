"""What a watcher of `/kvarn/live` costs: looks at a cache of 10,000 blocks while one sequence decodes.

    python bench/watching.py [--model smollm2] [--seconds 20] [--http]

The parts of the server run in this process. Half-second stretches of decoding with a look, a frame and its bytes four
times a second alternate with stretches without. Alternation cancels what else the machine does.

With --http, a server runs in a process of its own, and one long answer is streamed from it. Stretches of two seconds
with a client (curl) that reads `/kvarn/live` alternate with stretches without. Clients use the same processors.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from kvarn import LLM, SamplingParams
from kvarn.bench.http import Address, parse_address, request
from kvarn.server.access import Caller
from kvarn.server.inbox import Inbox
from kvarn.server.metrics import Metrics
from kvarn.server.page.live import PERIOD
from kvarn.server.page.observer import Observer
from kvarn.server.page.state import State
from kvarn.server.worker import Submission, Ticket, Worker

STRETCH, SERVED_STRETCH = 0.5, 2.0  # seconds
BLOCKS, BLOCK_SIZE = 10_000, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--http", action="store_true")
    args = parser.parse_args()
    if args.http:
        served(args.model, args.seconds)
    else:
        in_process(args)


def in_process(args: argparse.Namespace) -> None:
    llm = LLM(args.model, cache="paged", block_size=BLOCK_SIZE, cache_bytes=cache_bytes(args.model), context=8192)
    worker = Worker(llm, Metrics(llm.engine, args.model))
    params = SamplingParams(max_tokens=7000, ignore_eos=True)
    ticket = Ticket(worker, Submission([5] * 500, params, b"", 0, stream=False), Inbox(1), 0)
    worker.open.add(ticket)
    ticket.job = llm.runner.add([5] * 500, params, listener=ticket)
    sample = ticket.job.request.samples[0]
    llm.runner.advance(lambda: sample.n_output > 8)
    observer, state, caller = Observer(worker), State({}, 1), Caller(b"", b"", quotes=True)
    observer.start()
    looks, frames, sizes = [], [], []

    def look() -> None:
        began = time.perf_counter()
        seen = observer.look()
        looked = time.perf_counter()
        state.apply(seen)
        line = state.frame(state.tick - 1, caller)
        looks.append(looked - began)
        frames.append(time.perf_counter() - looked)
        sizes.append(len(line))

    first = time.perf_counter()
    state.apply(observer.look())
    whole = state.frame(None, caller)
    ms = 1e3 * (time.perf_counter() - first)
    print(f"{llm.cache.plan.n_blocks:,} blocks; the first look and frame: {ms:.1f} ms, {len(whole):,} bytes")
    ratios, end = [], time.monotonic() + args.seconds
    while time.monotonic() < end:
        without, watched, watched_again, without_again = (stretch(llm, each) for each in (None, look, look, None))
        ratios.append((watched + watched_again) / (without + without_again))
    each = statistics.median(looks), statistics.median(frames)
    print(f"a look {1e6 * each[0]:.0f} us, a frame {1e6 * each[1]:.0f} us, {statistics.median(sizes):,.0f} bytes")
    share = sum(each) / PERIOD
    print(f"look and frame: {100 * share:.3f} % of the time")
    change = 100 * (statistics.median(ratios) - 1)
    print(f"decode speed with a watcher: {change:+.2f} % (median of {len(ratios)} alternations)")
    llm.runner.cancel(ticket.job)


def cache_bytes(model: str) -> int:
    with LLM(model, cache="paged", block_size=BLOCK_SIZE, context=512) as small:
        return small.cache.plan.bytes_per_token * BLOCKS * BLOCK_SIZE


def stretch(llm: LLM, look: Callable[[], None] | None) -> float:
    """Steps per second."""
    began = next_look = time.perf_counter()
    n = 0
    while (now := time.perf_counter()) < began + STRETCH:
        if look is not None and now >= next_look:
            next_look += PERIOD
            look()
        llm.runner.step()
        n += 1
    return n / (time.perf_counter() - began)


def served(model: str, seconds: float) -> None:
    body = {"prompt": [5] * 100, "max_tokens": 8000, "ignore_eos": True, "stream": True, "model": model}
    with serving(model) as address:
        ratios, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            lines, found = request(address, "POST", "/v1/completions", body), []
            events(lines, SERVED_STRETCH / 4)
            for watched in (False, True, True, False):
                with watching(address) if watched else nullcontext():
                    events(lines, SERVED_STRETCH / 4)  # the first line of the stream has everything
                    found.append(events(lines, SERVED_STRETCH))
            ratios.append((found[1] + found[2]) / (found[0] + found[3]))
            lines.close()
    change = 100 * (statistics.median(ratios) - 1)
    spread = 100 * (max(ratios) - min(ratios))
    print(f"over HTTP: {change:+.2f} % (median of {len(ratios)} alternations, spread {spread:.1f} %)")


def events(lines: Iterator[bytes], seconds: float) -> float:
    """Events of the answer per second."""
    began, n = time.perf_counter(), 0
    while (now := time.perf_counter()) < began + seconds:
        n += next(lines).startswith(b"data: {")
    return n / (now - began)


@contextmanager
def watching(address: Address) -> Iterator[None]:
    """A process, so that it does not hold up the reader of the answer."""
    with subprocess.Popen(["curl", "-sN", f"{address}/kvarn/live"], stdout=subprocess.DEVNULL) as watcher:
        try:
            yield
        finally:
            watcher.kill()


@contextmanager
def serving(model: str) -> Iterator[Address]:
    code = "import sys; from kvarn.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", "-m", model, "--port", "0", "-c", "8192"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if line.startswith("address"))
        try:
            yield parse_address(line.split()[1])
        finally:
            process.kill()


if __name__ == "__main__":
    main()
