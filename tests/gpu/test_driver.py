"""Which stream the driver uses, with bindings that note every call. There is no device."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvarn.backends.cuda import driver as driver_module
from kvarn.backends.cuda.driver import Driver
from kvarn.backends.cuda.specs import Kernel, edit, norm_add
from kvarn.backends.cuda.store import Binary


class Bindings:
    """Every function succeeds. A new stream is a new number."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_OUT_OF_MEMORY=2)
    CUlaunchConfig = SimpleNamespace

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.n_streams = 0
        self.capability = 7

    def CUlaunchAttribute(self) -> Any:
        return SimpleNamespace(value=SimpleNamespace())

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return SimpleNamespace(**dict.fromkeys(NAMES, 0))  # an enumeration

        def call(*args: Any) -> tuple[int, Any]:
            if name == "cuLaunchKernelEx":
                args = (args[0].hStream, args[0].numAttrs)
            self.calls.append((name, args))
            if name == "cuStreamCreate":
                self.n_streams += 1
                return 0, f"stream {self.n_streams}"
            return 0, b"device" if name == "cuDeviceGetName" else self.capability

        return call

    def on_streams(self, name: str) -> list[str]:
        return [arg for called, args in self.calls if called == name for arg in args if str(arg).startswith("stream")]


NAMES = (
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
    "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "CU_STREAM_NON_BLOCKING",
    "CU_STREAM_CAPTURE_MODE_RELAXED",
    "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION",
)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    bindings = Bindings()
    monkeypatch.setattr(driver_module, "_bindings", lambda: bindings)
    return bindings


def launch(driver: Driver, kernel: Kernel | None = None) -> None:
    function = driver.function(kernel or edit())
    driver.launch(function, (1, 1, 1), [0] * (len(function.types) - 2))


@pytest.fixture
def driver(api: Bindings) -> Driver:
    found = Driver()
    found.load({kernel: Binary(b"", kernel.name, 0, 4) for kernel in (edit(), norm_add())})
    return found


@pytest.mark.parametrize(("capability", "attributes"), [(8, [0, 0, 0]), (9, [0, 1, 0])])
def test_kernels_that_can_start_early_do_so_where_the_device_can(
    api: Bindings, capability: int, attributes: list[int]
) -> None:
    api.capability = capability
    driver = Driver()
    driver.load({kernel: Binary(b"", kernel.name, 0, 4) for kernel in (edit(), norm_add())})
    for kernel in (edit(), norm_add(), edit()):
        launch(driver, kernel)
    assert [args[1] for name, args in api.calls if name == "cuLaunchKernelEx"] == attributes


def test_launches_are_captured_on_a_stream_of_their_own(driver: Driver, api: Bindings) -> None:
    """Another thread launches meanwhile, on the main stream."""

    def launches() -> None:
        launch(driver)
        other = threading.Thread(target=launch, args=(driver,))
        other.start()
        other.join()

    graph = driver.capture(launches)
    launch(driver)
    driver.replay(graph)
    assert api.on_streams("cuLaunchKernelEx") == ["stream 2", "stream 1", "stream 1"]
    assert api.on_streams("cuStreamBeginCapture") == api.on_streams("cuStreamEndCapture") == ["stream 2"]
    assert api.on_streams("cuStreamDestroy") == ["stream 2"]
    assert api.on_streams("cuGraphLaunch") == ["stream 1"]


def test_a_capture_that_fails_is_ended(driver: Driver, api: Bindings) -> None:
    with pytest.raises(ZeroDivisionError):
        driver.capture(lambda: print(1 / 0))
    assert api.on_streams("cuStreamEndCapture") == api.on_streams("cuStreamDestroy") == ["stream 2"]
    launch(driver)
    assert api.on_streams("cuLaunchKernelEx") == ["stream 1"]
