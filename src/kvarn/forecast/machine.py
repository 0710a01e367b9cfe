"""The rates of this machine: measured in tenths of a second, kept in kvarn's own folder, and measured again when old.

Figures are kept by processor, instruction set, order of sums and threads. What is kept is not trusted: a file that
cannot be read, or a figure that is no time, is measured again. A folder that cannot be written is no error.
Non-goals: the trials (backends/cpu/trials.py, engine_trial.py); what figures mean (rates.py).
"""

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvarn import __version__
from kvarn.backends.cpu import Cpu, trials
from kvarn.bench.machine import cpu_name
from kvarn.cache.plan import Plan
from kvarn.forecast import engine_trial
from kvarn.forecast import rates as figures
from kvarn.forecast.rates import Rates
from kvarn.forecast.work import Work
from kvarn.loading.paths import cache_folder
from kvarn.loading.progress import Progress, quiet

FILE = "machine.json"
KEPT = 7 * 86_400.0  # seconds
SLOWEST = 3600.0  # seconds: no figure is larger
Kept = dict[str, tuple[float, float]]  # figure: seconds, when it was measured
Trial = Callable[[], tuple[float, ...]]


def machine_of(backend: Cpu) -> str:
    """What figures are kept by."""
    facts = backend.facts()
    return f"{cpu_name()}, {facts['isa']}, {facts['order']}, {backend.pool.size} threads"


def kept_rates(backend: Cpu, work: Work, plan: Plan) -> Rates | None:
    """The figures that a model and a cache need, if all of them were measured before."""
    kept = read(machine_of(backend), time.time())
    needed = [name for names in _trials(backend, work, plan) for name in names]
    return Rates({name: kept[name][0] for name in needed}) if set(needed) <= kept.keys() else None


def rates_of(backend: Cpu, work: Work, plan: Plan, *, fresh: bool = False, progress: Progress = quiet) -> Rates:
    """The figures, measured as far as they are missing. `fresh`: measure all of them again."""
    machine, trials_of = machine_of(backend), _trials(backend, work, plan)
    kept = {} if fresh else read(machine, time.time())
    missing = [names for names in trials_of if not set(names) <= kept.keys()]
    for done, names in enumerate(missing):
        progress("measuring this machine", done, len(missing))
        kept |= {name: (seconds, time.time()) for name, seconds in zip(names, trials_of[names](), strict=True)}
    if missing:
        progress("measuring this machine", len(missing), len(missing))
        write(machine, kept)
    return Rates({name: kept[name][0] for names in trials_of for name in names})


def _trials(backend: Cpu, work: Work, plan: Plan) -> dict[tuple[str, ...], Trial]:
    """How figures are measured: those of one trial together."""
    pool = backend.pool
    found: dict[tuple[str, ...], Trial] = {}

    def add(figure: str, trial: Callable[[], float]) -> None:
        found[(figure,)] = lambda: (trial(),)

    add(figures.MEMORY, partial(trials.read_memory, pool))
    for kind in work.products:
        add(figures.read(kind), partial(trials.read_product, pool, kind))
        add(figures.multiply(kind), partial(trials.multiply, pool, kind))
    for group in plan.groups:
        spec, codec, layout = replace(group.config.spec, window=None, pinned=0), plan.codec.name, plan.layout.name
        shape = figures.shape_of(plan, spec)
        both = figures.small_attention(shape), figures.read_cells(shape)
        found[both] = partial(trials.decode_attention, pool, spec, codec, layout)
        add(figures.attend(shape), partial(trials.attend_many, pool, spec, codec, layout))
    add(figures.SMALL, partial(trials.small_product, pool))
    add(figures.STEP, partial(engine_trial.step_seconds, backend))
    add(figures.LOGIT, engine_trial.logit_seconds)
    return found


def read(machine: str, now: float) -> Kept:
    """The kept figures of a machine that are not too old, of this version of kvarn."""
    with suppress(OSError, ValueError, RecursionError):
        of_all = json.loads((cache_folder() / FILE).read_bytes())
        if isinstance(of_all, dict) and of_all.get("kvarn") == __version__:
            ours = of_all.get("machines")
            entries = ours.get(machine) if isinstance(ours, dict) else None
            if isinstance(entries, dict):
                return {name: entry for name, each in entries.items() if (entry := _entry(each, now))}
    return {}


def _entry(value: Any, now: float) -> tuple[float, float] | None:
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(each, int | float) for each in value):
        return None
    seconds, when = map(float, value)
    right = math.isfinite(seconds) and 0 < seconds < SLOWEST and 0 <= now - when < KEPT
    return (seconds, when) if right else None


def write(machine: str, kept: Mapping[str, tuple[float, float]]) -> None:
    """In one step: another process that reads sees the old or the new file."""
    folder = cache_folder()
    others: dict[str, Any] = {}
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((folder / FILE).read_bytes())
        if isinstance(found, dict) and found.get("kvarn") == __version__ and isinstance(found.get("machines"), dict):
            others = found["machines"]
    text = json.dumps({"kvarn": __version__, "machines": others | {machine: kept}}, indent=1)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".machine-", dir=folder)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, folder / FILE)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
