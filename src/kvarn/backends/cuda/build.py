"""Compiles kernels ahead of time. It needs Triton and no GPU.

    python -m kvarn.backends.cuda.build [--targets 90,100] [--into FOLDER] [--jobs N]

compiles all kernels for all targets into the package; `make kernels` runs it. Only this module and kernels/ import
Triton, and only in processes that compile (workers.py).
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from kvarn.backends.cuda.specs import EARLIEST, Constant, Kernel, catalogue
from kvarn.backends.cuda.store import (
    COMPILED_AS,
    MODULES,
    OPTIONS,
    PACKAGED,
    POINTER_ALIGNMENT,
    SOURCES,
    SUFFIX,
    TARGETS,
    TRITON,
    Binary,
    file_name,
    read,
    triton_version,
    write,
)
from kvarn.backends.cuda.workers import compile_all, processors, refusal
from kvarn.errors import KvarnError
from kvarn.loading.progress import Progress, quiet
from kvarn.words import counted, file_size

# Bytes of shared memory that a program can have. The compiler does not check it; a launch would fail.
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
LEAST_SHARED = min(SHARED.values())


def compile_kernel(kernel: Kernel, target: int) -> Binary:
    """In this process, which must not have set TRITON_INTERPRET. Stages are lowered until shared memory suffices."""
    most = SHARED.get(target, LEAST_SHARED)
    for stages in range(kernel.stages, 0, -1):  # they are not a part of the arithmetic
        compiled = _compiled(kernel, COMPILED_AS.get(target, target), stages)
        facts = compiled.metadata
        if facts.shared <= most:
            break
    if facts.global_scratch_size or facts.profile_scratch_size:
        raise KvarnError("it needs scratch memory, which a launch does not give it")
    if facts.shared > most:
        raise KvarnError(f"it needs {facts.shared} bytes of shared memory, and there are {most}: use smaller tiles")
    code = _assembled(compiled.asm["ptx"], target) if target in COMPILED_AS else compiled.asm["cubin"]
    return Binary(code, facts.name, facts.shared, facts.num_warps)


@lru_cache(maxsize=8)  # targets of one generation follow each other
def _compiled(kernel: Kernel, target: int, stages: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(import_module(f"{MODULES}.{kernel.name}"), kernel.name)
    names = [name for name, _ in (*kernel.arguments, *kernel.constants)]
    if function.arg_names != names:
        raise KvarnError(f"the function takes {', '.join(function.arg_names)}; its Kernel has {', '.join(names)}")
    signature = dict(kernel.arguments) | {name: "constexpr" for name, _ in kernel.constants}
    source = ASTSource(function, signature, constants(kernel, target), _alignment(kernel))
    options = OPTIONS | {"num_warps": kernel.warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def _assembled(ptx: str, target: int) -> bytes:
    """The binary for a target from the PTX of an older one. `triton.compile` cannot begin with PTX."""
    from triton.backends.compiler import GPUTarget, Language
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", target, 32))
    steps: dict[str, Any] = {}
    backend.add_stages(steps, backend.parse_options(OPTIONS), Language.TRITON)
    code: bytes = steps["cubin"](ptx, {})
    return code


def constants(kernel: Kernel, target: int) -> dict[str, Constant]:
    """Those of the target. One that is older than `EARLIEST` cannot start a kernel before the last one has ended."""
    given = dict(kernel.constants)
    return given | {"EARLY": 0} if "EARLY" in given and target < EARLIEST else given


def _alignment(kernel: Kernel) -> dict[tuple[int], list[list[str | int]]]:
    aligned = dict(kernel.aligned)
    multiples = [POINTER_ALIGNMENT if kind.startswith("*") else aligned.get(name, 1) for name, kind in kernel.arguments]
    return {(place,): [["tt.divisibility", multiple]] for place, multiple in enumerate(multiples) if multiple > 1}


@dataclass
class Built:
    compiled: int = 0
    present: int = 0
    nbytes: int = 0  # of all files
    failures: list[str] = field(default_factory=list)  # one line each


def build(
    kernels: Sequence[Kernel],
    targets: Sequence[int],
    folder: Path,
    jobs: int | None = None,
    progress: Progress = quiet,
    sources: Path = SOURCES,
) -> Built:
    """Compile for every target what the folder does not have yet."""
    built, missing = Built(), []
    for target in targets:
        for kernel in kernels:
            path = folder / file_name(kernel, target, sources)
            if read(path) is None:
                missing.append((kernel, target))
            else:
                built.present += 1
                built.nbytes += path.stat().st_size
    for done, (kernel, target, result) in enumerate(compile_all(missing, sources, jobs), 1):
        progress("compiling kernels", done, len(missing))
        if isinstance(result, str):
            built.failures.append(refusal(kernel, target, result))
            continue
        path = folder / file_name(kernel, target, sources)
        write(path, result)
        built.compiled += 1
        built.nbytes += path.stat().st_size
    return built


def prune(kernels: Sequence[Kernel], folder: Path, sources: Path = SOURCES) -> int:
    """Remove binaries that are not current, of all targets. Returns their number."""
    removed = 0
    for inside in folder.glob("sm_*"):
        target = int(inside.name.removeprefix("sm_"))
        current = {folder / file_name(kernel, target, sources) for kernel in kernels}
        for path in set(inside.glob(f"*{SUFFIX}*")) - current:  # also what an interrupted write left
            path.unlink()
            removed += 1
    return removed


def _targets(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write targets as 90,100") from None


def _show(what: str, done: int, total: int | None) -> None:
    end = "\n" if done == total else ""
    print(f"\r{what}: {done} of {total}", end=end, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvarn.backends.cuda.build", description="Compile all kernels.")
    parser.add_argument("--targets", type=_targets, default=TARGETS, help="compute capabilities: 90,100")
    parser.add_argument("--into", type=Path, default=PACKAGED, metavar="FOLDER", help="default: the package")
    parser.add_argument("--jobs", type=int, default=processors(), metavar="N", help="processes that compile")
    given = parser.parse_args(arguments)
    if triton_version() != TRITON:
        print(f"Triton {TRITON} is needed and {triton_version() or 'none'} is installed", file=sys.stderr)
        return 1
    begin = time.monotonic()
    kernels = catalogue()
    progress = _show if sys.stderr.isatty() else quiet
    built = build(kernels, given.targets, given.into, given.jobs, progress)
    removed = prune(kernels, given.into)
    rows = {
        "targets": " ".join(f"sm_{target}" for target in given.targets),
        "kernels": f"{counted(len(kernels), 'kernel')} each",
        "compiled": f"{built.compiled}, {built.present} were there, {removed} old ones removed",
        "size": file_size(built.nbytes),
        "time": f"{time.monotonic() - begin:.1f} s",
    }
    for name, value in rows.items():
        print(f"{name:<9} {value}")
    for failure in built.failures:
        print(failure, file=sys.stderr)
    return 1 if built.failures else 0


if __name__ == "__main__":
    sys.exit(main())
