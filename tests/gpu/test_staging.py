"""Copies of weights through page-locked buffers: the bytes arrive, and no buffer is filled while it is copied."""

import threading

import numpy as np
import pytest
from gpu.support.recording import RecordingDriver

from kvarn.backends.cuda import staging
from kvarn.backends.cuda.buffers import Allocation
from kvarn.backends.cuda.staging import Staging

SIZES = (1, 4096, 100, 4095, 4096, 4096, 7, 2000, 4096, 33, 4096)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE", 4096)


@pytest.mark.parametrize("threads", [1, 3, None])
def test_all_bytes_arrive(driver, threads: int | None) -> None:
    data = [np.random.default_rng(i).integers(0, 256, size, np.uint8) for i, size in enumerate(SIZES)]
    places = [Allocation(driver, size) for size in SIZES]
    puts = Staging(driver, threads)
    for place, bytes_ in zip(places, data, strict=True):
        puts.put(place.address, len(bytes_), lambda out, bytes_=bytes_: np.copyto(out, bytes_))
    puts.finish()
    for place, bytes_ in zip(places, data, strict=True):
        assert (driver.view(place.address, (len(bytes_),), np.uint8) == bytes_).all()


def test_a_buffer_waits_for_its_copy() -> None:
    driver = RecordingDriver()
    place = Allocation(driver, 4096)
    puts = Staging(driver, 1)  # two buffers
    for i in range(6):
        puts.put(place.address, 4096, lambda out, i=i: out.fill(i))
    puts.finish()  # the driver checks that nothing changed what it was copying
    verbs = [call.verb for call in driver.calls if call.verb in ("send", "wait", "synchronize")]
    assert verbs.count("send") == 6
    assert verbs.count("wait") == 4, "a buffer that was never copied is not waited for"
    assert verbs[-1] == "synchronize"


def test_buffers_are_filled_at_the_same_time() -> None:
    driver = RecordingDriver()
    place, both = Allocation(driver, 16), threading.Barrier(2)
    puts = Staging(driver, 2)

    def fill(out: np.ndarray) -> None:
        both.wait(30)
        out.fill(1)

    for _ in range(2):
        puts.put(place.address, 16, fill)
    puts.finish()


def test_an_error_while_filling_is_raised() -> None:
    driver = RecordingDriver()
    place = Allocation(driver, 16)

    def fail(out: np.ndarray) -> None:
        raise ValueError("a bad tensor")

    puts = Staging(driver, 1)
    puts.put(place.address, 16, fail)
    with pytest.raises(ValueError, match="a bad tensor"):
        puts.finish()
    puts.close()
    assert not [call for call in driver.calls if call.verb == "send"]
