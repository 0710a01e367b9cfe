"""Request bodies: how many large ones are in memory at the same time, and what stays of them."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from starlette.requests import Request
from support.serving import Served, serve, tiny_model

from kvarn.server.bodies import LARGE, MOST_BYTES, Bodies, ByteBudget
from kvarn.server.parse import parse as parse_body
from kvarn.server.refusal import Refusal


def request(receive: Callable[[], Awaitable[dict]], length: int | None) -> Request:
    headers = [] if length is None else [(b"content-length", str(length).encode())]
    return Request({"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers}, receive)


def sends(*parts: bytes) -> Callable[[], Awaitable[dict]]:
    left = list(parts)

    async def receive() -> dict:
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    return receive


async def parsed(bodies: Bodies, asked: Request, parse: Callable[[bytes], object]) -> object:
    return (await bodies.process(asked, parse, lambda result: None))[0]


def test_who_does_not_fit_waits_in_order() -> None:
    async def play() -> None:
        budget, order = ByteBudget(10), []

        async def use(name: str, n: int) -> None:
            await budget.take(n)
            budget.check()
            order.append(name)

        await budget.take(6)
        tasks = [asyncio.ensure_future(use(name, n)) for name, n in (("large", 8), ("left", 3), ("small", 2))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == [], "the small one does not overtake"
        tasks[1].cancel()
        budget.give_back(6)
        await asyncio.wait(tasks)
        assert (order, budget.used) == (["large", "small"], 10)
        budget.give_back(10)
        budget.check()
        await asyncio.wait_for(budget.take(10), 60)

    asyncio.run(play())


@pytest.mark.parametrize("turns", range(4))
def test_nothing_is_lost_if_one_that_waits_is_cancelled(turns: int) -> None:
    """Before its turn, and as its turn comes."""

    async def play() -> None:
        budget = ByteBudget(10)
        await budget.take(10)
        first, second = (asyncio.ensure_future(budget.take(10)) for _ in range(2))
        await asyncio.sleep(0)
        if turns % 2:
            budget.give_back(10)
        for _ in range(turns // 2):
            await asyncio.sleep(0)
        cancelled = first.cancel()
        if not turns % 2:
            budget.give_back(10)
        if not cancelled:  # it had got its turn
            budget.give_back(10)
        await asyncio.wait_for(second, 60)
        assert budget.used == 10

    asyncio.run(play())


def test_large_bodies_wait_for_each_other_and_small_ones_do_not() -> None:
    async def play() -> None:
        bodies, more, asked = Bodies(60, MOST_BYTES), asyncio.Event(), []

        async def stalls() -> dict:
            if not asked:
                asked.append("a large part")
                return {"type": "http.request", "body": b"x" * (LARGE + 1), "more_body": True}
            await more.wait()
            return {"type": "http.request", "body": b"x", "more_body": False}

        first = asyncio.ensure_future(parsed(bodies, request(stalls, None), len))
        while not bodies.budget.used:
            await asyncio.sleep(0)
        assert bodies.budget.used == MOST_BYTES, "its length is not known"
        large = b"y" * (LARGE + 1)
        second = asyncio.ensure_future(parsed(bodies, request(sends(large, large), 2 * len(large)), len))
        assert await parsed(bodies, request(sends(b"small"), 5), len) == 5
        assert await parsed(bodies, request(sends(b"z" * LARGE), None), len) == LARGE
        assert not second.done()
        more.set()
        assert await asyncio.wait_for(first, 60) == LARGE + 2
        assert await asyncio.wait_for(second, 60) == 2 * len(large)
        assert bodies.budget.used == 0

    asyncio.run(play())


def test_large_bodies_are_parsed_one_at_a_time() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def parse(raw: bytes) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.001)
        with lock:
            running -= 1
        return len(raw)

    async def play() -> None:
        bodies, large = Bodies(60), b"x" * (LARGE + 1)
        calls = [parsed(bodies, request(sends(large), len(large)), parse) for _ in range(20)]
        assert await asyncio.gather(*calls) == [len(large)] * 20
        assert bodies.budget.used == 0

    asyncio.run(play())
    assert most == 1


def test_who_waits_too_long_is_refused() -> None:
    async def play() -> None:
        bodies, large = Bodies(0.05, MOST_BYTES), b"x" * (LARGE + 1)
        await bodies.budget.take(MOST_BYTES)
        with pytest.raises(Refusal, match="too many large bodies at the same time") as caught:
            await parsed(bodies, request(sends(large, b""), len(large)), len)
        assert (caught.value.status, caught.value.retry_after) == (503, 1)
        bodies.budget.give_back(MOST_BYTES)
        assert await parsed(bodies, request(sends(large), len(large)), len) == len(large)
        with pytest.raises(ZeroDivisionError):
            await parsed(bodies, request(sends(large), len(large)), lambda raw: 1 // 0)
        assert bodies.budget.used == 0

    asyncio.run(play())


def test_a_length_that_is_too_large_is_refused_before_the_body() -> None:
    async def play() -> None:
        with pytest.raises(Refusal, match="the body has more than 8388608 bytes"):
            await parsed(Bodies(), request(sends(), MOST_BYTES + 1), len)

    asyncio.run(play())


def test_bodies_of_too_many_items_are_refused_before_they_are_parsed() -> None:
    for item, n in ((b"{},", 1 << 18), (b"[],", 1 << 18), (b"1,", 1 << 20)):
        with pytest.raises(Refusal, match="the body has more than 1048576 items, or 262144 objects and lists"):
            parse_body(b'{"metadata": [' + item * n + b"1, 1]}")
    assert len(parse_body(b'{"tokens": [' + b"1," * ((1 << 20) - 1) + b"1]}")["tokens"]) == 1 << 20


def resident(server: Served, field: str = "VmRSS") -> float:
    """In MiB."""
    status = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")
def test_memory_of_large_bodies_does_not_stay(tmp_path: Path) -> None:
    """Eight bodies at a time took 690 MiB at the most, and up to 270 MiB of them stayed."""
    item = b'{"a":"abcdefghijklmnopqrstuvwx"},'
    body = b'{"prompt":"abc","max_tokens":1,"metadata":[' + (item * (8_000_000 // len(item)))[:-1] + b"]}"
    statuses: list[int] = []

    def eight(server: Served) -> None:
        threads = [
            threading.Thread(target=lambda: statuses.append(server.ask("/v1/completions", body).status))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with serve(tiny_model(tmp_path, 256)) as server:
        server.ask("/v1/completions", {"prompt": "abc", "max_tokens": 1})
        before = resident(server)
        for _ in range(3):
            eight(server)
        assert statuses == [200] * 24
        assert resident(server, "VmHWM") < before + 250, "at the most"
        server.until(lambda: resident(server) < before + 60)
