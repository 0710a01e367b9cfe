"""Every kernel is compiled for every target, without a GPU. Failures are collected, so that one run names all."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from gpu.support.demo import DEMOS, PRODUCT, SCALE

from kvarn.backends.cuda import build, specs, store, tiling, workers
from kvarn.backends.cuda.planes import KINDS, Planes
from kvarn.backends.cuda.specs import Kernel, catalogue
from kvarn.backends.cuda.store import TARGETS, Store, file_name, read
from kvarn.errors import KvarnError
from kvarn.loading.progress import quiet

ROOT = Path(__file__).resolve().parent.parent.parent
# Kept between runs: a kernel whose digest is the same is not compiled again.
COMPILED = ROOT / "build" / "gpu" / "kernels"
DISASSEMBLER = Path(str(importlib.util.find_spec("triton").origin)).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return shutil.copytree(DEMOS, tmp_path / "sources")


def test_there_are_at_most_100_specialisations() -> None:
    """Each takes about a second of compilation and 40 KB: a kernel of attention per codec and size of heads is worth
    it, one per pair of codecs is not."""
    assert 0 < len(catalogue()) <= 100
    assert len(set(catalogue())) == len(catalogue())


def test_every_kernel_has_a_file_and_every_file_a_kernel() -> None:
    """A file that only has functions for others says so by being imported by one."""
    files = {path.stem for path in store.SOURCES.glob("*.py")} - {"__init__"}
    names = {kernel.name for kernel in catalogue()}
    assert names <= files, f"no file: {sorted(names - files)}"
    imported = {name for kernel in names for name, _ in store._texts(kernel, store.SOURCES)}
    assert files <= imported, f"no kernel: {sorted(files - imported)}"


def test_every_kernel_compiles_for_every_target() -> None:
    built = build.build(catalogue(), TARGETS, COMPILED)
    assert built.failures == []
    assert built.compiled + built.present == len(catalogue()) * len(TARGETS)
    build.prune(catalogue(), COMPILED)


@pytest.mark.parametrize("planes", KINDS, ids=lambda planes: planes.name)
def test_packed_products_load_while_they_multiply(planes: Planes, tmp_path: Path) -> None:
    """In the code for sm_90: asynchronous copies, tensor cores, two weights per fma, no weights in shared memory."""
    kernels = [specs.linear_packed(planes, *tile) for tile in tiling.tiles("packed")]
    assert build.build(kernels, [90], COMPILED).failures == []
    for kernel in kernels:
        binary = read(COMPILED / file_name(kernel, 90))
        assert binary is not None
        (tmp_path / "code").write_bytes(binary.code)
        said = subprocess.run([DISASSEMBLER, "-sass", tmp_path / "code"], capture_output=True, text=True, check=True)
        names = re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", said.stdout, re.MULTILINE)
        found, product = Counter(names), "HMMA" if kernel.warps < 4 else "HGMMA"
        assert found["LDGSTS"] > 8, kernel.title
        assert found[product] >= planes.blocks * planes.span // 16, kernel.title
        weights = planes.unit * kernel.size("BN") // (32 * kernel.warps)  # of a thread, in a step
        assert weights // 2 <= found["HFMA2"] <= weights // 2 + 8, kernel.title
        inside = set(names[names.index(product) : -names[::-1].index(product)])
        assert not inside & {"STS", "STL", "LDL"}, kernel.title


def test_demo_kernels_compile_for_every_target(tmp_path: Path) -> None:
    kernels = [SCALE, *PRODUCT.values()]
    seen = []
    built = build.build(kernels, TARGETS, tmp_path, 2, lambda *facts: seen.append(facts), DEMOS)
    assert (built.compiled, built.present, built.failures) == (24, 0, [])
    assert seen == [("compiling kernels", done, 24) for done in range(1, 25)]
    for target in TARGETS:
        binary = read(tmp_path / file_name(PRODUCT["bf16"], target, DEMOS))
        assert binary is not None
        assert binary.code.startswith(b"\x7fELF")
        flags = int.from_bytes(binary.code[48:52], "little")
        assert target in (flags & 0xFF, flags >> 8 & 0xFF), "assembled for this target, whatever it was compiled as"
        assert (binary.function, binary.warps) == ("demo_product", 4)
        assert binary.shared > 0, "operands of a product go through shared memory"
        assert str(ROOT).encode() not in binary.code, "no path of this machine"
    again = build.build(kernels, TARGETS, tmp_path, 2, quiet, DEMOS)
    assert (again.compiled, again.present, again.nbytes) == (0, 24, built.nbytes)


def test_only_stale_files_are_removed(tmp_path: Path, sources: Path) -> None:
    build.build([SCALE], [80, 90], tmp_path, 1, quiet, sources)
    assert build.prune([SCALE], tmp_path, sources) == 0
    (tmp_path / "sm_90" / ".x.kernel.1-2").write_text("left by an interrupted write")
    (sources / "demo_one.py").write_text((sources / "demo_one.py").read_text() + "\n# new\n")
    build.build([SCALE], [90], tmp_path, 1, quiet, sources)
    assert build.prune([SCALE], tmp_path, sources) == 3
    assert [path.name for path in tmp_path.rglob("*.kernel")] == [file_name(SCALE, 90, sources).split("/")[1]]


BAD = {
    "an error of Triton": (
        "    tl.store(out, missing)",
        "at 2:18: CompilationError: NameError('missing is not defined')",
    ),
    "an error of Python": ("    tl.store(out, 1.0)\n\n\n1 / 0", "ZeroDivisionError: division by zero"),
    "a crash": ("    tl.store(out, 1.0)\n\n\nimport os\nos.abort()", "its process ended with status -6: "),
    "another signature": (None, "KvarnError: the function takes x; its Kernel has out"),
    "too much shared memory": (
        "    row, column = tl.arange(0, 32), tl.arange(0, 1024)\n"
        "    tile = tl.load(out + row[:, None] * 1024 + column[None, :]).to(tl.float16)\n"
        "    tl.store(out + row[:, None] * 32 + row[None, :], tl.dot(tile, tl.trans(tile) + tl.trans(tile)))",
        "bytes of shared memory, and there are 101376: use smaller tiles",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_failing_kernel_is_named_and_the_others_compile(sources: Path, tmp_path: Path, case: str) -> None:
    body, reason = BAD[case]
    head = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef demo_bad("
    text = "x):\n    pass\n" if body is None else f"out):\n{body}\n"
    (sources / "demo_bad.py").write_text(head + text)
    bad = Kernel("demo_bad", (("out", "*fp32"),), ())
    built = build.build([bad, SCALE], [86], tmp_path, 1, quiet, sources)
    assert built.compiled == 1
    (failure,) = built.failures
    assert failure.startswith("the kernel demo_bad fp32 does not compile for sm_86: ")
    assert reason in failure
    assert "\n" not in failure
    with pytest.raises(KvarnError) as caught:
        Store(tmp_path / "package", tmp_path / "cache", sources).find([bad], 86, quiet)
    assert str(caught.value) == failure


def test_a_store_compiles_what_is_missing_and_triton_leaves_no_files(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "TMPDIR", "TRITON_CACHE_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr("tempfile.tempdir", None)
    folders = Store(tmp_path / "package", tmp_path / "cache", sources)
    found = folders.find([SCALE, PRODUCT["bf16"]], 90, quiet)
    assert folders.summary == "2 compiled"
    assert {kernel.name: binary.function for kernel, binary in found.items()} == {
        "demo_scale": "demo_scale",
        "demo_product": "demo_product",
    }
    assert [path for name in ("HOME", "TMPDIR", "TRITON_CACHE_DIR") for path in (tmp_path / name).iterdir()] == []
    assert len(list((tmp_path / "cache" / "sm_90").iterdir())) == 2


def test_targets_of_one_generation_are_compiled_together() -> None:
    tasks = [(kernel, target) for target in TARGETS for kernel in (SCALE, PRODUCT["bf16"])]
    groups = [[target for _, target in group] for group in workers._of_one_ptx(tasks)]
    assert groups == [[80, 86, 89]] * 2 + [[90]] * 2 + [[100]] * 2 + [[120]] * 2
    assert all(len({kernel for kernel, _ in group}) == 1 for group in workers._of_one_ptx(tasks))


def test_an_abandoned_compilation_ends_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    popen = subprocess.Popen

    def start(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(workers.subprocess, "Popen", start)
    results = workers.compile_all([(SCALE, target) for target in TARGETS], DEMOS, 2)
    next(results)
    results.close()
    assert 1 <= len(started) <= 2
    assert all(process.poll() is not None for process in started)


def test_equal_source_gives_equal_code() -> None:
    """In two processes: nothing but the digest's content is in the code."""
    codes = [result.code for _, _, result in workers.compile_all([(PRODUCT["bf16"], 90)] * 2, DEMOS, 2)]
    assert codes[0] == codes[1]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(build, "catalogue", lambda: (specs.Kernel("demo_none", (), ()),))
    monkeypatch.setattr(build, "triton_version", lambda: "3.6.0")
    assert build.main(["--into", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "Triton 3.9.0 is needed and 3.6.0 is installed\n"
    result = subprocess.run(
        [sys.executable, "-m", build.__name__, "--targets", "ninety"], capture_output=True, text=True, env=os.environ
    )
    assert result.returncode == 2
    assert "'ninety': write targets as 90,100" in result.stderr
