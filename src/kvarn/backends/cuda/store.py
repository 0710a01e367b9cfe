"""Where the binaries of kernels are found: in the package, in the user's cache folder, or compiled now.

A binary is one file, FOLDER/sm_90/NAME-DIGEST.kernel: the checksum of what follows, a line of facts in JSON, and
the machine code. The digest covers everything that the machine code depends on: the source of the kernel
and of the kernels that it imports, the fields of its Kernel, the target and what it is compiled as, the version
of Triton and the options. So a binary that is not current is never found, and one that is damaged counts as absent.

This module does not import Triton. workers.py starts processes that do.
"""

import ast
import importlib.metadata
import json
import logging
import os
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import astuple, dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

from kvarn.backends.cuda.specs import Kernel, catalogue
from kvarn.errors import KvarnError
from kvarn.loading.paths import cache_folder
from kvarn.loading.progress import Progress
from kvarn.words import counted

TARGETS = (80, 86, 89, 90, 100, 120)  # compute capabilities of the binaries in a release
COMPILED_AS = {86: 80, 89: 80}  # targets of one generation: the PTX of its first target is assembled for each of them
TRITON = "3.9.0"  # the version that compiles them; the extra cuda-build installs it
POINTER_ALIGNMENT = 16  # bytes; every pointer argument has it
OPTIONS = {"enable_fp_fusion": False}  # stated, because the default changes bits and changes between versions

PACKAGED = Path(__file__).parent / "binaries"
SOURCES = Path(__file__).parent / "kernels"
MODULES = "kvarn.backends.cuda.kernels"
SUFFIX = ".kernel"

log = logging.getLogger("kvarn")


@dataclass(frozen=True, slots=True)
class Binary:
    """Machine code, and what a launch must know."""

    code: bytes
    function: str
    shared: int  # bytes of shared memory
    warps: int


def digest(kernel: Kernel, target: int, sources: Path = SOURCES) -> str:
    options = [TRITON, POINTER_ALIGNMENT, sorted(OPTIONS.items())]
    facts = [astuple(kernel), target, COMPILED_AS.get(target), *options, _texts(kernel.name, sources)]
    return blake2b(repr(facts).encode(), digest_size=10).hexdigest()


@cache
def revision() -> str:
    """Of everything that machine code is made from: results of two revisions may differ in their bits."""
    texts = [(path.name, path.read_text("utf-8")) for path in sorted(SOURCES.glob("*.py"))]
    facts = [list(map(astuple, catalogue())), TRITON, POINTER_ALIGNMENT, sorted(OPTIONS.items()), texts]
    return blake2b(repr(facts).encode(), digest_size=5).hexdigest()


def _texts(name: str, sources: Path) -> list[tuple[str, str]]:
    """The source of a kernel and of all kernels that it imports. Universal newlines make line ends equal."""
    found: dict[str, str] = {}
    waiting = [name]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found[each] = (sources / f"{each}.py").read_text("utf-8")
            waiting += _imported(ast.parse(found[each]), each)
    return sorted(found.items())


def _imported(tree: ast.Module, name: str) -> list[str]:
    """Names of the kernel files that a kernel file imports."""
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == MODULES:
            modules += [f"{MODULES}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append("." * node.level + (node.module or ""))
    ours = [module for module in modules if module.startswith(("kvarn", "."))]
    for module in ours:
        assert module.startswith(f"{MODULES}."), f"kernels/{name}.py imports {module}, which no digest covers"
    return [module.removeprefix(f"{MODULES}.") for module in ours]


def file_name(kernel: Kernel, target: int, sources: Path = SOURCES) -> str:
    return f"sm_{target}/{kernel.name}-{digest(kernel, target, sources)}{SUFFIX}"


def read(path: Path) -> Binary | None:
    """None if there is no such file, or if it is damaged."""
    try:
        checksum, content = path.read_bytes().split(b"\n", 1)
        if checksum != _checksum(content):
            return None
        facts, code = content.split(b"\n", 1)
        return Binary(code=code, **json.loads(facts))
    except (OSError, ValueError, TypeError):
        return None


def write(path: Path, binary: Binary) -> None:
    """Processes that write one path at the same time do not disturb each other or a reader."""
    facts = {"function": binary.function, "shared": binary.shared, "warps": binary.warps}
    content = json.dumps(facts).encode() + b"\n" + binary.code
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        draft.write_bytes(_checksum(content) + b"\n" + content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _checksum(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).hexdigest().encode()


def triton_version() -> str | None:
    """The installed version, found without importing it."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


class Store:
    def __init__(self, packaged: Path = PACKAGED, cache: Path | None = None, sources: Path = SOURCES) -> None:
        self.packaged, self.sources = packaged, sources
        self.cache = cache or cache_folder() / "kernels"
        self.counts = {"from the package": 0, "from the cache": 0, "compiled": 0}
        self._kept: dict[tuple[Kernel, int], Binary] = {}

    @property
    def summary(self) -> str:
        """Where the kernels came from: `50 from the package, 12 compiled`."""
        return ", ".join(f"{n} {where}" for where, n in self.counts.items() if n) or "none"

    def find(self, kernels: Sequence[Kernel], target: int, progress: Progress) -> dict[Kernel, Binary]:
        """The binaries of all these kernels. What is missing is compiled, in parallel, and stored in the cache."""
        wanted = list(dict.fromkeys(kernels))
        missing = [kernel for kernel in wanted if not self._look_up(kernel, target)]
        if missing:
            self._check_compiler(len(missing), target)
            self._compile(missing, target, progress)
        return {kernel: self._kept[kernel, target] for kernel in wanted}

    def _look_up(self, kernel: Kernel, target: int) -> bool:
        if (kernel, target) in self._kept:
            return True
        name = file_name(kernel, target, self.sources)
        for where, folder in (("from the package", self.packaged), ("from the cache", self.cache)):
            binary = read(folder / name)
            if binary is not None:
                self._keep(kernel, target, binary, where)
                return True
        return False

    def _keep(self, kernel: Kernel, target: int, binary: Binary, where: str) -> None:
        self._kept[kernel, target] = binary
        self.counts[where] += 1

    def _check_compiler(self, n_missing: int, target: int) -> None:
        have = triton_version()
        if have != TRITON:
            here = "is not installed" if have is None else f"is needed (Triton {have} is installed)"
            raise KvarnError(
                f"{counted(n_missing, 'kernel')} for sm_{target} must be compiled, and Triton {TRITON}, which does it, "
                f"{here}: pip install 'kvarn[cuda-build]', or run make kernels in a checkout of kvarn"
            )

    def _compile(self, kernels: list[Kernel], target: int, progress: Progress) -> None:
        from kvarn.backends.cuda.workers import compile_all, refusal

        refused: OSError | None = None
        progress("compiling kernels", 0, len(kernels))
        with closing(compile_all([(kernel, target) for kernel in kernels], self.sources)) as results:
            for done, (kernel, _, result) in enumerate(results, 1):
                if isinstance(result, str):
                    raise KvarnError(refusal(kernel, target, result))
                self._keep(kernel, target, result, "compiled")
                try:
                    write(self.cache / file_name(kernel, target, self.sources), result)
                except OSError as error:
                    refused = error
                progress("compiling kernels", done, len(kernels))
        if refused is not None:
            reason = refused.strerror or refused
            log.warning("compiled kernels could not be stored in %s (%s): set KVARN_CACHE", self.cache, reason)
