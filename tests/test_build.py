"""The build and the rules of the house, as far as a test can see them."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvarn import isa

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "kvarn"


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
    assert isa.available()[-1] == "portable"


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_bookkeeping_imports_no_tensor_library() -> None:
    cache = SOURCE / "cache"
    files = [cache / f"{name}.py" for name in ("spec", "placement", "blocks", "prefix", "strategy")]
    for path in files + sorted((cache / "placements").glob("*.py")):
        heavy = {name for name in imports(path) if name.split(".")[0] in ("numpy", "torch")}
        assert not heavy, path


def test_dependencies_point_one_way() -> None:
    """The cache knows no command, model or server; of the backends it knows the interface only."""
    for path in (SOURCE / "cache").rglob("*.py"):
        for name in imports(path):
            assert not name.startswith(("kvarn.cli", "kvarn.models", "kvarn.server")), path
            assert not name.startswith("kvarn.backends") or name == "kvarn.backends.base", path


def test_the_engine_knows_no_text_no_http_and_no_prometheus() -> None:
    above = ("kvarn.server", "kvarn.cli", "kvarn.text", "kvarn.llm", "kvarn.metrics", "kvarn.load")
    web = {"starlette", "uvicorn", "h11", "asyncio", "http", "prometheus_client"}
    for name in ("engine", "scheduler", "kept", "request", "sampling", "stats", "explain", "turn"):
        for found in imports(SOURCE / f"{name}.py"):
            assert not found.startswith(above), (name, found)
            assert found.split(".")[0] not in web, (name, found)


def test_one_file_knows_prometheus() -> None:
    for path in SOURCE.rglob("*.py"):
        if path != SOURCE / "metrics.py":
            assert not any(name.startswith("prometheus") for name in imports(path)), path


@pytest.mark.parametrize("axis", ["layouts", "codecs", "placements"])
def test_an_axis_is_one_file_per_member_and_one_table(axis: str) -> None:
    folder = SOURCE / "cache" / axis
    members = {path.stem for path in folder.glob("*.py")} - {"__init__", "region"}
    table = imports(folder / "__init__.py")
    for member in members:
        assert f"kvarn.cache.{axis}.{member}" in table


def test_files_are_read_in_one_sitting() -> None:
    for path in [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.?pp")]:
        assert len(path.read_text().splitlines()) <= 400, path
