import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import harness, tiny

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in a shell's background job: what the tests start would hear none
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `auto` is the cpu backend in these tests, also on a machine with a device, and in the processes that they start.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


if importlib.util.find_spec("triton") is None:  # `make test-gpu` has an environment with it
    collect_ignore = ["gpu"]


@pytest.fixture(params=harness.BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with harness.using(request.param):
        yield request.param


@pytest.fixture
def reference() -> Iterator[str]:
    with harness.using("reference"):
        yield "reference"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that does not look at content also runs on a backend that computes nothing."""
    if metafunc.definition.get_closest_marker("any_backend"):
        metafunc.fixturenames.append("computing")
        metafunc.parametrize("computing", [True, False], ids=["computed", "null"], indirect=True)


@pytest.fixture
def computing(request: pytest.FixtureRequest) -> Iterator[bool]:
    tiny.computing = request.param
    yield request.param
    tiny.computing = True


ORDER = (
    "test_smoke.py",
    "cache",
    "graph",
    "backends",
    "models",
    "loading",
    "text",
    "engine",
    "jobs",
    "server",
    "bench",
    "comparison",
)
LONGEST = ("test_real_models.py", "test_forecast.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is cheap and tells most comes first; within a folder nothing moves. Several processes begin with what takes
    longest: otherwise one of them is left with it at the end."""
    several = "PYTEST_XDIST_WORKER" in os.environ

    def place(item: pytest.Item) -> int:
        if several and item.path.name in LONGEST:
            return -1
        part = item.path.relative_to(Path(__file__).parent).parts[0]
        return ORDER.index(part) if part in ORDER else len(ORDER)

    items.sort(key=place)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """With test material present nothing has an excuse to be skipped, but that the processor cannot run it."""
    outcome = yield
    report = outcome.get_result()
    lacks = call.excinfo is not None and call.excinfo.errisinstance(harness.LacksInstructions)
    if report.skipped and os.environ.get("KVARN_TEST_MATERIAL") and not lacks and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped although KVARN_TEST_MATERIAL is set: {reason}"
