"""Soak: many clients; a fifth leave early, some send invalid bodies, read slowly or are killed. `make soak`.

Every request must be answered or refused; afterwards nothing is held, the engine is healthy (it checks the cache's
invariants whenever it comes to rest) and memory is flat. A body that comes again, in whatever company, must get the
same answer again. With `--minutes` the requests are repeated until then.
"""

import argparse
import asyncio
import itertools
import json
import random
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from support.serving import Served, serve, tiny_model

RUBBISH = [
    b"",
    b"{",
    b'{"prompt": "\xff"}',
    b'{"prompt": [1e99]}',
    b'{"prompt": "a", "max_tokens": -5}',
    b'{"prompt": "a", "tools": [1]}',
    b'{"messages": 5}',
    b"[" * 5000,
]
# Words that come again: the tokenizers library keeps the last 10,000 it has seen, which is no leak and looks like one.
WORDS = [f"{a}{b}{c}" for a in "bdfgklmnpr" for b in "aeiou" for c in "lmnrst"]
SHARED = " ".join(WORDS[:50])
KINDS = {"rubbish": 5, "cancel": 10, "reset": 10, "slow": 10, "whole": 30, "stream": 35}  # in percent
FLAT = 4 << 20  # bytes that the second half may add to the process
BODIES = 200  # different ones


def body_of(rng: random.Random, kind: str) -> bytes:
    if kind == "rubbish":
        return rng.choice(RUBBISH)
    own = " ".join(rng.choices(WORDS, k=rng.randrange(1, 10)))
    text = SHARED[: rng.randrange(200)] + " " + own
    body = {"prompt": text, "max_tokens": rng.randrange(1, 40), "temperature": rng.choice([0, 1.2]), "seed": 1}
    body |= {"stream": kind != "whole", "n": rng.choice([1, 1, 1, 2]), "cache_salt": rng.choice(["a", "b"])}
    return json.dumps(body).encode()


def answers(kind: str, text: bytes) -> tuple[str, ...]:
    """The texts of the choices."""
    if kind == "whole":
        return tuple(choice["text"] for choice in json.loads(text)["choices"])
    texts: dict[int, str] = {}
    for line in text.splitlines():
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return tuple(texts[i] for i in sorted(texts))


async def call(server: Served, kind: str, body: bytes, rng: random.Random, known: dict[bytes, tuple[str, ...]]) -> str:
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=1 << 20)
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        if kind in ("cancel", "reset"):
            await asyncio.sleep(rng.random() * 0.3)
            if kind == "reset":  # as when the caller's process is killed
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return kind
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        text = b""
        while piece := await reader.read(200 if kind == "slow" else 65536):
            text += piece
            if kind == "slow":
                await asyncio.sleep(0.01)
        status = head.split()[1]
        if status == "200" and kind != "whole" and b"data: [DONE]" not in text:
            return "cut short"
        if status == "200":
            found = answers(kind, text)
            if known.setdefault(body.replace(b'"stream": false', b'"stream": true'), found) != found:
                return "another answer"
        return status
    finally:
        writer.close()


async def play(
    server: Served, requests: int, concurrency: int, seed: int, minutes: float
) -> tuple[Counter, list[float]]:
    rng, gate, outcomes, memory = random.Random(seed), asyncio.Semaphore(concurrency), Counter(), []
    kinds = rng.choices(list(KINDS), weights=list(KINDS.values()), k=requests)
    known: dict[bytes, tuple[str, ...]] = {}
    end = time.monotonic() + 60 * minutes

    async def one(i: int, kind: str) -> None:
        async with gate:
            own = random.Random(seed * 1_000_003 + i)
            body = body_of(random.Random(seed * 1_000_003 + i % BODIES), kind)
            outcome = await asyncio.wait_for(call(server, kind, body, own, known), 300)
        outcomes[f"{kind}: {outcome}"] += 1

    starts = list(range(0, requests, max(requests // 10, 1)))
    for start in itertools.cycle(starts) if minutes else starts:
        if minutes and time.monotonic() > end:
            break
        batch = kinds[start : start + max(requests // 10, 1)]
        await asyncio.gather(*(one(start + i, kind) for i, kind in enumerate(batch)))
        memory.append(await asyncio.to_thread(server.metric, "process_resident_memory_bytes"))
        of = "" if minutes else f" of {requests}"
        print(f"{sum(outcomes.values())}{of}, {memory[-1] / 2**20:.1f} MiB", file=sys.stderr)
    return outcomes, memory


def main() -> int:
    parser = argparse.ArgumentParser(description="soak a server")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="default: a tiny one")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--minutes", type=float, default=0, help="repeat the requests for so long")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or tiny_model(Path(folder), 512)
        flags = ["--cache-bytes", "256K"] if args.model is None else []
        with serve(model, "-np", "8", "-c", "512", "--chunk", "32", "--backend", args.backend, *flags) as server:
            played = play(server, args.requests, args.concurrency, args.seed, args.minutes)
            outcomes, memory = asyncio.run(played)
            server.until_idle()
            cache, healthy = server.cache(), server.ask("/health").status == 200
            names = ("num_preemptions", "kv_cache_evictions", "prefix_cache_hits")
            counts = [f"{name} {server.metric(f'kvarn:{name}_total'):.0f}" for name in names]
            stopped = server.stop()
    for outcome, n in sorted(outcomes.items()):
        print(f"{outcome:<20} {n}")
    print(", ".join(counts))
    growth = memory[-1] - memory[len(memory) // 2 - 1]
    print(f"blocks held {cache['blocks']['used']}, sequences {cache['sequences']}, healthy {healthy}, exit {stopped}")
    first, middle, last = (memory[i] / 2**20 for i in (0, len(memory) // 2 - 1, -1))
    print(f"memory {first:.1f} MiB after a tenth, {middle:.1f} half-way, {last:.1f} at the end")
    fine = {"rubbish: 400", "cancel: cancel", "reset: reset", *(f"{k}: 200" for k in ("slow", "whole", "stream"))}
    ok = set(outcomes) <= fine and not cache["blocks"]["used"] and not cache["sequences"] and healthy
    ok = ok and stopped == 0 and growth < FLAT
    print("clean" if ok else "NOT CLEAN")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
