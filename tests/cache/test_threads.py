"""The entry points that promise to be atomic, from several threads at once."""

import random
import threading

import pytest
from support.harness import Driven

from kvarn.backends.reference import Reference
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec
from kvarn.errors import OutOfSequences

LAYERS = [LayerSpec(2, 1, 1, 1, window=24), LayerSpec(2, 1, 1, 1)]


@pytest.mark.requirement(35)
@pytest.mark.parametrize("strategy", ["paged", "contiguous", "ring"])
def test_requests_of_many_threads_at_once(strategy: str) -> None:
    """Six threads open, adopt, reserve, fork, rewind and free while one runs steps and another checks."""
    config = CacheConfig(LAYERS, 96, strategy, "f32", block_size=16, max_seqs=12, max_chunk=96)
    cache = Driven(config, Reference())
    failures: list[BaseException] = []
    finished = threading.Event()
    to_step: list[tuple[int, list[int], threading.Event]] = []
    lock = threading.Lock()

    def guarded(work):
        def run():
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - any failure of a thread fails the test
                failures.append(error)
                finished.set()

        return run

    def engine() -> None:
        while not finished.is_set():
            with lock:
                batch, to_step[:] = list(to_step), []
            if not batch:
                continue
            cache.prepare([seq for seq, _, _ in batch])
            for seq, tokens, done in batch:
                cache.commit(seq, tokens)
                done.set()

    def watcher() -> None:
        while not finished.is_set():
            usage = cache.usage()
            assert 0 <= usage.blocks_used + usage.blocks_cached <= usage.blocks
            cache.book.check()  # atomic; the tables belong to the thread that runs steps

    def client(number: int) -> None:
        rng = random.Random(number)
        for turn in range(40):
            if finished.is_set():
                return
            seq = number * 1000 + turn
            try:
                cache.open(seq)
            except OutOfSequences:
                continue
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 90))]
            reused = cache.adopt(seq, tokens).reused
            if cache.reserve(seq, len(tokens)):
                done = threading.Event()
                with lock:
                    to_step.append((seq, tokens[reused:], done))
                assert done.wait(30)
                cache.rewind(seq, rng.randint(0, len(tokens)))
                try:
                    if cache.fork(seq, seq + 500):
                        cache.free(seq + 500)
                except OutOfSequences:
                    pass
            cache.free(seq)
            cache.free(seq)

    clients = [threading.Thread(target=guarded(lambda n=n: client(n)), daemon=True) for n in range(6)]
    others = [threading.Thread(target=guarded(work), daemon=True) for work in (engine, watcher)]
    for thread in clients + others:
        thread.start()
    for thread in clients:
        thread.join(60)
    finished.set()
    for thread in others:
        thread.join(60)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in clients + others)
    cache.check()
    assert cache.usage().sequences == cache.usage().blocks_used == 0
