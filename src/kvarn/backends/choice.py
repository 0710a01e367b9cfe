"""Which backend to open: the one that was asked for, or with `auto` the first that can run the model.

    opening = Opening("auto", threads)               what no model can change is refused here
    opened = opening.finish(config, checkpoint)      the backend for this cache and this model

`choose` decides, from facts alone. A backend that was asked for by name and cannot run the model is an error. With
`auto`, a device that is there and cannot be used is worth a warning; on a machine without one, nothing is said.
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvarn.backends import AUTO, check_threads, open_backend, place_of
from kvarn.backends.base import Backend
from kvarn.cache.plan import CacheConfig, Plan, plan
from kvarn.errors import KvarnError, OutOfMemory
from kvarn.loading.checkpoint import Checkpoint
from kvarn.loading.progress import Progress, quiet

if TYPE_CHECKING:
    from kvarn.backends.cuda.probe import Device, Probe

log = logging.getLogger("kvarn")

BESIDE = 2 << 30  # bytes that a device needs beside the weights: its context, the workspace, a margin, a small cache


@dataclass(frozen=True, slots=True)
class Choice:
    """What `auto` chose."""

    name: str
    why: str
    quiet: bool = True  # False: there is a device, and it is not used

    def __str__(self) -> str:
        return f"{AUTO}: {self.why}"


class Opened(NamedTuple):
    backend: Backend
    choice: Choice | None = None  # None: it was asked for by name

    @property
    def facts(self) -> dict[str, str]:
        """The backend's facts, and why `auto` chose it."""
        return {**self.backend.facts(), **({"chosen": str(self.choice)} if self.choice else {})}


@dataclass(frozen=True, slots=True)
class Fit:
    """A device, and what must fit there."""

    device: str
    free_bytes: int
    weight_bytes: int
    cache_bytes: int = 0  # if the user gave a number

    @property
    def lack(self) -> str | None:
        """Why the weights do not fit."""
        needed = BESIDE + self.cache_bytes
        if self.weight_bytes + needed <= self.free_bytes:
            return None
        wanted, beside, free = (f"{n / 2**30:.1f} GiB" for n in (self.weight_bytes, needed, self.free_bytes))
        return f"the weights need {wanted} and {beside} beside them, and {self.device} has {free} free"


def choose(refusal: str | None, fit: Fit) -> Choice:
    """For a device that can be used. `refusal` is what the backend says about this cache."""
    if why := refusal or fit.lack:
        return Choice("cpu", why, quiet=False)
    return Choice("cuda", f"{fit.device} is there" + (" and holds the weights" if fit.weight_bytes else ""))


def device_for(backend: str, config: CacheConfig, checkpoint: Checkpoint) -> "Device | None":
    """The device that `backend` (a name, or `auto`) would run this model on; None: the host. Nothing is opened. If cuda
    was asked for by name, it raises if there is none, and does not ask whether the weights fit."""
    if backend == "cuda":
        from kvarn.backends.cuda.probe import usable_device

        return usable_device()
    found = _probe() if backend == AUTO else None
    if found is None or found.obstacle or found.device is None:
        return None
    fit = _fit(found.device.name, found.device.free_bytes, config, checkpoint)
    return found.device if choose(_refusal(config), fit).name == "cuda" else None


class Opening:
    """A backend by name, or an open one. It is opened here if the model makes no difference."""

    def __init__(self, backend: str | Backend, threads: int | None = None, progress: Progress = quiet) -> None:
        self._threads, self._progress = threads, progress
        self._opened: Opened | None = None
        self._device: Device | None = None  # that `auto` may take
        if not isinstance(backend, str) and hasattr(backend, "load"):
            self._opened = Opened(backend)
        elif backend != AUTO:
            self._opened = Opened(open_backend(str(backend), threads, progress))
        else:
            check_threads(threads)
            found = _probe()
            if found.obstacle:
                self._opened = self._host(Choice("cpu", found.obstacle, quiet=found.absent))
            self._device = found.device

    def finish(self, config: CacheConfig, checkpoint: Checkpoint | None = None) -> Opened:
        """The backend for this cache and these weights. `kvarn strategies` has no weights."""
        if self._opened is None:
            assert self._device is not None
            self._opened = self._chosen(self._device, config, checkpoint)
        elif self._opened.choice is None and self._opened.backend.name == "cuda":
            _require(self._opened.backend, config, checkpoint)
        return self._opened

    def _chosen(self, device: "Device", config: CacheConfig, checkpoint: Checkpoint | None) -> Opened:
        choice = choose(_refusal(config), _fit(device.name, device.free_bytes, config, checkpoint))
        if choice.name == "cpu":
            return self._host(choice)
        try:
            return Opened(open_backend(choice.name, self._threads, self._progress), choice)
        except (KvarnError, ImportError) as error:  # no kernels for it, or packages that do not work
            return self._host(Choice("cpu", str(error), quiet=False))

    def _host(self, choice: Choice) -> Opened:
        if not choice.quiet:
            log.warning("computing on the CPU: %s", choice.why)
        return Opened(open_backend(choice.name, self._threads, self._progress), choice)


def _require(backend: Backend, config: CacheConfig, checkpoint: Checkpoint | None) -> None:
    """Refuse, before weights are loaded, a model that this backend cannot run."""
    from kvarn.backends.cuda.limits import MARGIN, require

    require(_draft(config))
    room = backend.room()
    if room is not None and (why := _fit(place_of(backend), room + MARGIN, config, checkpoint).lack):
        raise OutOfMemory(f"{why}: use a smaller model, or --backend cpu")


# The modules of a backend are imported when they are asked for.


def _probe() -> "Probe":
    from kvarn.backends.cuda.probe import probe

    return probe()


def _refusal(config: CacheConfig) -> str | None:
    from kvarn.backends.cuda.limits import refusal

    return refusal(_draft(config))


def _draft(config: CacheConfig) -> Plan:
    """A plan that no backend has asked for. It has the layout that the user asked for, if there is one."""
    return plan(config, "head-major")


def _fit(device: str, free_bytes: int, config: CacheConfig, checkpoint: Checkpoint | None) -> Fit:
    from kvarn.backends.cuda.limits import weight_bytes

    weights = 0 if checkpoint is None else weight_bytes(checkpoint)
    return Fit(device, free_bytes, weights, config.cache_bytes or 0)
