"""A driver that computes nothing: it records every call and checks what a real one would not forgive.

It refuses what is undefined on a device: access outside of an allocation, a pointer or an integer that is less
aligned than its kernel was compiled for, an integer that does not fit its type, and pinned memory that
changes while it is being sent. It needs neither Triton nor a GPU.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvarn.backends.cuda.specs import Kernel
from kvarn.errors import OutOfMemory

ALIGNMENT = 256  # of allocations, as on a device
POINTER_ALIGNMENT = 16  # that every kernel is compiled for
LARGEST_GRID = (2**31 - 1, 65535, 65535)
INTEGERS = {f"{sign}{bits}": (bits, sign == "i") for sign in "iu" for bits in (8, 16, 32, 64)}


class Call(NamedTuple):
    verb: str  # the name of a function of Device
    args: tuple[int | float, ...]  # of a launch: the kernel's arguments; otherwise addresses and sizes
    name: str = ""  # of the kernel
    grid: tuple[int, int, int] = (0, 0, 0)
    kernel: Kernel | None = None

    def argument(self, name: str) -> int | float:
        """An argument of a launch, by its name in the kernel."""
        assert self.kernel is not None, self
        return dict(zip((each for each, _ in self.kernel.arguments), self.args, strict=True))[name]


class Function:
    """A loaded kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel


class Graph(NamedTuple):
    """Launches, with the allocations that they name."""

    launches: list[tuple[Function, tuple[int, int, int], tuple[int | float, ...]]]
    named: dict[int, int]  # address -> serial number of its allocation


class Event:
    def __init__(self) -> None:
        self.ms: float | None = None  # None: not recorded yet
        self.arriving: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []  # what is received before it


def _addresses(function: Function, args: Sequence[int | float]) -> Iterator[int]:
    for (_, kind), value in zip(function.kernel.arguments, args, strict=True):
        if kind[0] == "*" and value:
            yield int(value)


class RecordingDriver:
    version = "13.0"

    def __init__(self, name: str = "Recording", target: int = 90, total_bytes: int = 1 << 30) -> None:
        self.name, self.target, self.total_bytes = name, target, total_bytes
        self.processors = 12
        self.calls: list[Call] = []
        self.live: dict[int, int] = {}  # address -> bytes, of allocations
        self.closed = False
        self._serials: dict[int, int] = {}  # address -> how many allocations there were before
        self._captured: list[Any] | None = None  # launches that are being captured
        self._starts: list[int] = []  # the addresses in order
        self._next = 1 << 20
        self._functions: dict[Kernel, Function] = {}
        self._pinned: list[NDArray[np.uint8]] = []
        self._in_flight: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []  # what is being sent, and a copy of it
        self._arriving: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []  # where to, and what
        self._clock = 0.0

    def launches(self, name: str | None = None) -> list[Call]:
        """The launches so far, of one kernel or of all."""
        return [call for call in self.calls if call.verb == "launch" and name in (None, call.name)]

    def bind(self) -> None:
        assert not self.closed, "the driver is closed"

    # Memory

    def free_bytes(self) -> int:
        return self.total_bytes - sum(self.live.values())

    def allocate(self, nbytes: int) -> int:
        assert nbytes > 0, f"an allocation of {nbytes} bytes"
        if nbytes > self.free_bytes():
            raise OutOfMemory(f"no room for {nbytes} bytes on {self.name}: {self.free_bytes()} bytes are free")
        address = self._allocate(nbytes)
        assert address % ALIGNMENT == 0
        self.live[address], self._serials[address] = nbytes, len(self.calls)
        self._starts = sorted(self.live)
        self._note("allocate", address, nbytes)
        return address

    def release(self, address: int) -> None:
        assert address in self.live, f"{address:#x} is not an allocation"
        self._note("release", address)
        self._arrive()
        self._release(address)
        del self.live[address]
        self._starts = sorted(self.live)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        self._note("pinned", nbytes)
        self._pinned.append(np.full(nbytes, 0xFF, np.uint8))
        return self._pinned[-1]

    def upload(self, address: int, data: NDArray[Any]) -> None:
        self._check(address, data.nbytes, data)
        self._note("upload", address, data.nbytes)
        self._write(address, data)

    def download(self, address: int, out: NDArray[Any]) -> None:
        self._check(address, out.nbytes, out)
        self._note("download", address, out.nbytes)
        self._arrive()
        self._read(address, out)

    def send(self, address: int, data: NDArray[np.uint8]) -> None:
        self._check(address, data.nbytes, data)
        assert any(np.may_share_memory(data, each) for each in self._pinned), "send takes pinned memory"
        self._note("send", address, data.nbytes)
        self._in_flight.append((data, data.copy()))
        self._write(address, data)

    def receive(self, address: int, out: NDArray[np.uint8]) -> None:
        """The bytes are there when an event after it was waited for; until then they are 0xFF."""
        self._check(address, out.nbytes, out)
        assert any(np.may_share_memory(out, each) for each in self._pinned), "receive takes pinned memory"
        self._note("receive", address, out.nbytes)
        data = np.empty_like(out)
        self._read(address, data)
        out[...] = 0xFF
        self._arriving.append((out, data))

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        self._check(address, nbytes)
        assert 0 <= byte <= 0xFF
        self._note("fill", address, byte, nbytes)
        self._write(address, np.full(nbytes, byte, np.uint8))

    # Launches

    def load(self, binaries: dict[Kernel, Any]) -> None:
        """Kernels are loaded when they are first asked for."""

    def function(self, kernel: Kernel) -> Function:
        if kernel not in self._functions:
            self._functions[kernel] = self._load(kernel)
        return self._functions[kernel]

    def launch(self, function: Function, grid: tuple[int, int, int], args: Sequence[int | float]) -> None:
        kernel = function.kernel
        self._check_launch(kernel, grid, args)
        if self._captured is not None:
            self._captured.append((function, grid, tuple(args)))
            return
        self.calls.append(Call("launch", tuple(args), kernel.name, grid, kernel))
        self._run(function, grid, args)

    def capture(self, launches: Callable[[], None]) -> Graph:
        """Nothing runs meanwhile, and whatever is not a launch is refused."""
        self._note("capture")
        self._captured = []
        try:
            launches()
            named = {each: self._serial(each) for launch in self._captured for each in _addresses(launch[0], launch[2])}
            return Graph(self._captured, named)
        finally:
            self._captured = None

    def replay(self, graph: Graph) -> None:
        self._note("replay")
        for address, serial in graph.named.items():
            assert self.holds(address, 1), f"a graph names {address:#x}, which was released"
            assert self._serial(address) == serial, f"a graph names {address:#x}, which is another allocation now"
        for function, grid, args in graph.launches:
            self.launch(function, grid, args)

    def synchronize(self) -> None:
        self._note("synchronize")
        self._arrive()

    def event(self) -> Event:
        return Event()

    def record(self, event: Event) -> None:
        """Every event is one millisecond after the one before."""
        self._note("record")
        self._clock += 1.0
        event.ms = self._clock
        event.arriving, self._arriving = self._arriving, []

    def wait(self, event: Event) -> None:
        """Everything that was sent has arrived, and not only what came before the event. The call says how many
        copies to the host came with it."""
        self._note("wait", len(event.arriving))
        self._arrive()
        for out, data in event.arriving:
            out[...] = data
        event.arriving = []

    def elapsed(self, start: Event, end: Event) -> float:
        assert start.ms is not None, "the start was not recorded"
        assert end.ms is not None, "the end was not recorded"
        return end.ms - start.ms

    def close(self) -> None:
        self._arrive()
        for address in list(self.live):
            self._release(address)
        self.live, self._starts, self.closed = {}, [], True

    # Checks

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes are in one allocation."""
        place = bisect_right(self._starts, address) - 1
        return place >= 0 and address + nbytes <= self._starts[place] + self.live[self._starts[place]]

    def _check(self, address: int, nbytes: int, host: NDArray[Any] | None = None) -> None:
        assert not self.closed, "the driver is closed"
        assert self.holds(address, nbytes), f"{nbytes} bytes at {address:#x} are not in an allocation"
        assert host is None or host.flags.c_contiguous, "the host's array is not contiguous"

    def _check_launch(self, kernel: Kernel, grid: tuple[int, int, int], args: Sequence[int | float]) -> None:
        title = kernel.title
        assert not self.closed, "the driver is closed"
        assert len(args) == len(kernel.arguments), f"{title}: {len(args)} arguments, not {len(kernel.arguments)}"
        assert len(grid) == 3, f"{title}: a grid of {grid}"
        assert all(0 < n <= most for n, most in zip(grid, LARGEST_GRID, strict=True)), f"{title}: a grid of {grid}"
        aligned = dict(kernel.aligned)
        for (name, kind), value in zip(kernel.arguments, args, strict=True):
            if kind[0] == "*":
                assert isinstance(value, int), f"{title}: {name} is not an address"
                assert value % POINTER_ALIGNMENT == 0, f"{title}: {name} = {value:#x} is not aligned"
                assert value == 0 or self.holds(value, 1), f"{title}: {name} = {value:#x} is not in an allocation"
            elif kind in INTEGERS:
                bits, signed = INTEGERS[kind]
                assert isinstance(value, int), f"{title}: {name} = {value} is not an integer"
                low, high = (-(1 << bits - 1), 1 << bits - 1) if signed else (0, 1 << bits)
                assert low <= value < high, f"{title}: {name} = {value} does not fit {kind}"
                multiple = aligned.get(name, 1)
                assert value % multiple == 0, f"{title}: {name} = {value} is not a multiple of {multiple}"

    def _arrive(self) -> None:
        """Everything that was sent has arrived. Until now the host may not have changed it."""
        for data, copy in self._in_flight:
            assert np.array_equal(data, copy), "pinned memory was changed while it was being sent"
        self._in_flight.clear()

    def _serial(self, address: int) -> int:
        return self._serials[self._starts[bisect_right(self._starts, address) - 1]]

    def _note(self, verb: str, *args: int) -> None:
        assert self._captured is None, f"{verb} while launches are captured"
        self.calls.append(Call(verb, args))

    # What a driver that computes does differently

    def _allocate(self, nbytes: int) -> int:
        address = self._next
        self._next += -(-nbytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT  # a gap, so that no two allocations touch
        return address

    def _release(self, address: int) -> None:
        pass

    def _write(self, address: int, data: NDArray[Any]) -> None:
        pass

    def _read(self, address: int, out: NDArray[Any]) -> None:
        out.view(np.uint8)[...] = 0

    def _load(self, kernel: Kernel) -> Function:
        return Function(kernel)

    def _run(self, function: Function, grid: tuple[int, int, int], args: Sequence[int | float]) -> None:
        pass
