"""The same bits on every machine: with every BLAS kernel, NumPy dispatch, libm and instruction set.

Libraries choose their instructions when they are loaded, so each case of them is a process of its own. It runs
tests/bitwise.py, which says what it computes and what that is compared with.
"""

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.harness import LacksInstructions, bits, chunks, run, using

from kvarn import native
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec

HERE = Path(__file__).parents[1]
GOLDEN = json.loads((HERE / "golden" / "bits.json").read_text())

CORES = ("Prescott", "Nehalem", "Sandybridge", "Haswell", "Zen", "SkylakeX", "Cooperlake", "SapphireRapids")


def numpy_features() -> list[str]:
    """What NumPy chooses among at run time on this processor, most basic first. The names differ between versions."""
    core = np._core if hasattr(np, "_core") else np.core
    found = core._multiarray_umath
    return [name for name in found.__cpu_dispatch__ if found.__cpu_features__.get(name)]


def cases() -> list[pytest.param]:
    found = [pytest.param({}, id="as it is")]
    found += [pytest.param({"OPENBLAS_CORETYPE": core}, id=f"BLAS for {core}") for core in CORES]
    features = numpy_features()
    for n in range(len(features)):
        off = " ".join(features[n:])
        found.append(pytest.param({"NPY_DISABLE_CPU_FEATURES": off}, id=f"NumPy without {off}"))
    if platform.libc_ver()[0] == "glibc":
        tunables = "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F"
        found.append(pytest.param({"GLIBC_TUNABLES": tunables}, id="libm without FMA"))
    return found


def run_bitwise(environment: dict[str, str]) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVARN_ISA", "KVARN_SUM_ORDER"))}
    command = [sys.executable, str(HERE / "bitwise.py"), *(["--brief"] if environment else [])]
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, Future]]:
    """The processes of all cases, two at a time: each has one thread."""
    with ThreadPoolExecutor(2) as pool:
        yield {case.id: pool.submit(run_bitwise, case.values[0]) for case in cases()}


@pytest.mark.parametrize(("environment", "name"), [pytest.param(*c.values, c.id, id=c.id) for c in cases()])
def test_the_same_bits_on_every_machine(environment: dict[str, str], name: str, processes: dict[str, Future]) -> None:
    ran = processes[name].result()
    if ran.returncode == -signal.SIGILL and not ran.stderr.startswith("ready"):
        raise LacksInstructions(f"this processor cannot run NumPy with {environment}")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == GOLDEN


def test_bits_do_not_depend_on_the_instruction_set() -> None:
    results = []
    for name in native.isas():
        with using(name), using("reference"):  # cells are encoded natively
            output, _ = run(CacheConfig([LayerSpec(8, 1, 8, 8)], 64, "paged", "int8"), chunks(0, 50, 1))
        results.append(bits(output[0, 0]))
    for other in results[1:]:
        assert (results[0] == other).all()
