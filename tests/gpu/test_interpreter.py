"""The driver that runs kernels in Triton's interpreter, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
from gpu.support.arithmetic import OutsideMemory, narrow, widen
from gpu.support.demo import DEMOS, PRODUCT, SCALE
from gpu.support.interpreter import InterpretingDriver

import kvarn.backends.cuda.kernels as kernels
from kvarn.errors import OutOfMemory


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> InterpretingDriver:
    monkeypatch.setattr(kernels, "__path__", [*kernels.__path__, str(DEMOS)])
    return InterpretingDriver(total_bytes=1 << 20)


def upload(driver: InterpretingDriver, data: np.ndarray) -> int:
    address = driver.allocate(data.nbytes)
    driver.upload(address, data)
    return address


def scaled(driver: InterpretingDriver, n: int, factor: float, /, **changes: int) -> np.ndarray:
    x, out = upload(driver, np.arange(n, dtype=np.float32)), driver.allocate(4 * n)
    args = {"x": x, "out": out, "n": n, "stride": 8, "factor": factor} | changes
    driver.launch(driver.function(SCALE), (-(-n // 16), 1, 1), tuple(args.values()))
    result = np.empty(n, np.float32)
    driver.download(out, result)
    return result


@pytest.mark.parametrize("n", [1, 16, 37])
def test_a_launch_computes(driver: InterpretingDriver, n: int) -> None:
    assert (scaled(driver, n, 2.5) == np.arange(n) * 2.5 + 1).all()
    driver.close()


@pytest.mark.parametrize(("kind", "step"), [("bf16", 2**-7), ("fp16", 2**-10), ("fp32", 2**-20)])
def test_products_are_exact_in_f32(driver: InterpretingDriver, kind: str, step: float) -> None:
    """Two factors 1 + step: their product needs twice the digits of the type."""
    a = np.full((16, 32), 1 + step, np.float32)
    stored = {"bf16": narrow, "fp16": np.float16, "fp32": np.float32}[kind](a)
    out = driver.allocate(4 * 16 * 16)
    driver.launch(driver.function(PRODUCT[kind]), (1, 1, 1), (upload(driver, stored), upload(driver, stored), out))
    expected = np.float32(32 * (1 + np.float64(step)) ** 2)
    assert (driver.view(out, (16, 16), np.float32) == expected).all()


def test_rounding_to_bf16() -> None:
    numbers = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.3e38, np.inf, np.nan], np.float32)
    expected = np.array([1, 1, 1 + 2**-6, 1 + 2**-7, -3.3e38, np.inf, np.nan], np.float32)
    assert np.allclose(widen(narrow(numbers)), expected, rtol=2e-3, atol=0, equal_nan=True)
    assert (widen(narrow(numbers))[:4] == expected[:4]).all()


def test_unwritten_memory_is_nan(driver: InterpretingDriver) -> None:
    got = np.zeros(8, np.float32)
    driver.download(driver.allocate(32), got)
    assert np.isnan(got).all()


def test_access_outside_of_memory_is_an_error(driver: InterpretingDriver) -> None:
    with pytest.raises(OutsideMemory, match=r"program \(2, 0, 0\) writes 4 bytes at 0x"):
        scaled(driver, 37, 2.5, out=driver.allocate(4 * 32))


def test_bytes_around_an_allocation_are_guarded(driver: InterpretingDriver) -> None:
    address = driver.allocate(100)
    driver._bytes(address, 101)[100] = 0
    for check in (driver.check, lambda: driver.release(address), driver.close):
        with pytest.raises(AssertionError, match="bytes after the 100 bytes"):
            check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stride": 12}, "demo_scale fp32 BLOCK 16: stride = 12 is not a multiple of 8"),
        ({"n": 2**31}, "n = 2147483648 does not fit i32"),
        ({"n": 1.0}, "n = 1.0 is not an integer"),
        ({"x": 8}, "x = 0x8 is not aligned"),
        ({"x": 4096}, "x = 0x1000 is not in an allocation"),
    ],
)
def test_arguments_are_checked(driver: InterpretingDriver, changes: dict, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        scaled(driver, 16, 1.0, **changes)
    assert driver.launches() == []


def test_calls_are_recorded(driver: InterpretingDriver) -> None:
    scaled(driver, 37, 2.5)
    assert [call.verb for call in driver.calls] == ["allocate", "upload", "allocate", "launch", "download"]
    (launch,) = driver.launches("demo_scale")
    assert (launch.grid, launch.argument("n"), launch.argument("factor")) == ((3, 1, 1), 37, 2.5)
    assert driver.launches("other") == []


def test_pinned_memory_may_not_change_while_it_is_sent(driver: InterpretingDriver) -> None:
    address, data = driver.allocate(8), driver.pinned(8)
    data[:] = 1
    driver.send(address, data)
    driver.synchronize()
    data[:] = 2
    driver.send(address, data)
    data[:] = 3
    with pytest.raises(AssertionError, match="pinned memory was changed"):
        driver.synchronize()
    with pytest.raises(AssertionError, match="send takes pinned memory"):
        driver.send(address, data.copy())


def test_memory_is_limited_and_released(driver: InterpretingDriver) -> None:
    address = driver.allocate(1 << 19)
    with pytest.raises(OutOfMemory, match="no room for 1048576 bytes on Interpreter: 524288 bytes are free"):
        driver.allocate(1 << 20)
    driver.release(address)
    with pytest.raises(AssertionError, match="is not an allocation"):
        driver.release(address)
    assert driver.free_bytes() == 1 << 20


def test_events_are_ordered(driver: InterpretingDriver) -> None:
    start, end = driver.event(), driver.event()
    driver.record(start)
    driver.record(end)
    assert driver.elapsed(start, end) > 0
    with pytest.raises(AssertionError, match="the end was not recorded"):
        driver.elapsed(start, driver.event())


def test_demo_kernels_are_not_in_the_package() -> None:
    assert not any(Path(folder, "demo_scale.py").exists() for folder in kernels.__path__)
