"""The build, the import rules, and the example in the README."""

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvarn import native
from kvarn.backends.cuda.store import TRITON

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "kvarn"
_spec = importlib.util.spec_from_file_location("rules", ROOT / "scripts" / "imports.py")
rules = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(rules)


def test_without_a_compiler_cmake_says_what_to_do(tmp_path: Path) -> None:
    cmake = Path(sys.executable).parent / "cmake"
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={Path(sys.executable).parent / 'ninja'}"]
    result = subprocess.run(
        [cmake, "-S", ROOT, "-B", tmp_path / "build", *generator], env=environment, capture_output=True, text=True
    )
    assert result.returncode != 0
    message = " ".join(result.stderr.split())
    assert "kvarn needs a C++20 compiler and found none. Install one (Debian/Ubuntu: apt install g++;" in message


def test_without_a_compiler_make_says_what_to_do(tmp_path: Path) -> None:
    for tool in ("sh", "make", "rm", "touch", "echo", "test"):
        found = next(p for d in os.environ["PATH"].split(":") if (p := Path(d) / tool).exists())
        (tmp_path / tool).symlink_to(found)
    (tmp_path / "python3").symlink_to(sys.executable)
    command = ["make", "-C", ROOT, f"VENV={tmp_path}/venv", "test"]
    result = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert result.returncode != 0
    assert "kvarn needs a C++20 compiler and found none (looked for $CXX, c++, g++, clang++)." in result.stdout
    assert not (tmp_path / "venv").exists()


def test_nothing_shipped_is_tuned_to_the_building_machine() -> None:
    assert "march=native" not in (ROOT / "CMakeLists.txt").read_text()
    assert native.isas()[-1] == "portable"


@pytest.mark.requirement(39)
def test_imports_follow_the_rules_and_have_no_cycle() -> None:
    """The rules are in scripts/imports.py: the cache is integers, models know no backend, the engine no text."""
    assert rules.violations() == []


def test_a_forbidden_import_and_a_cycle_are_found(tmp_path: Path) -> None:
    for name, text in {
        "cache/plan.py": "import numpy",
        "models/llama.py": "from kvarn.backends import cpu",
        "backends/cpu.py": "from kvarn import models",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert rules.violations(tmp_path) == [
        "cache/plan.py: cache may not import numpy",
        "models/llama.py: models may not import kvarn.backends",
        "a cycle of imports: backends -> models -> backends",
    ]


def test_only_the_metrics_import_prometheus() -> None:
    for path in SOURCE.rglob("*.py"):
        if path not in (SOURCE / "server" / "metrics.py", SOURCE / "server" / "engine_metrics.py"):
            assert not any(name.startswith("prometheus") for name in rules.imports(path)), path


def test_only_kernels_and_their_build_import_triton() -> None:
    """It is a build tool of 1 GB, and not needed where kvarn runs."""
    cuda = SOURCE / "backends" / "cuda"
    for path in SOURCE.rglob("*.py"):
        if path != cuda / "build.py" and path.parent != cuda / "kernels":
            assert not any(name.split(".")[0] == "triton" for name in rules.imports(path)), path


def test_the_extra_installs_the_triton_that_kernels_are_named_by() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["cuda-build"] == [f"triton=={TRITON}; platform_system == 'Linux'"]


@pytest.mark.parametrize("axis", ["layouts", "placements"])
def test_an_axis_is_one_file_per_member_and_one_table(axis: str) -> None:
    folder = SOURCE / "cache" / axis
    members = {path.stem for path in folder.glob("*.py")} - {"__init__", "region"}
    table = rules.imports(folder / "__init__.py")
    for member in members:
        assert f"kvarn.cache.{axis}.{member}" in table


def test_files_have_at_most_400_lines() -> None:
    for path in [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.?pp")]:
        assert len(path.read_text().splitlines()) <= 400, path


def test_the_readmes_cache_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [block.split("```")[0] for block in (ROOT / "README.md").read_text().split("```python\n")[1:]]
    (example,) = [block for block in blocks if "KVCache(planned)" in block]
    exec(compile(example, "README.md", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Adoption(reused=0, ")
    assert second.startswith("Adoption(reused=99, ")
