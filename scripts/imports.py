"""Which part of kvarn may import which: `make check` refuses anything else.

    python scripts/imports.py [SOURCE]

ALLOWED lists, for the parts that must stay independent, all that they may import of kvarn and of other packages. The
import graph over parts (a package, or a module that lies at the top) has no cycle.
"""

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "kvarn"
ALLOWED: dict[str, set[str]] = {
    "arrays": {"numpy"},
    "cache": {"errors"},  # integers: no array, no device, no extension
    "graph": {"errors"},
    "models": {"graph", "cache.spec", "errors", "numpy"},
    "text": {"errors", "native", "numpy", "jinja2", "tokenizers"},
    "loading": {"arrays", "errors", "models", "graph", "numpy", "gguf", "safetensors", "huggingface_hub"},
    # The engine speaks token ids: no text, no HTTP, no metrics, and of the backends the interface alone.
    "engine": {"arithmetic", "arrays", "backends.base", "cache", "errors", "numpy"},
    "jobs": {"engine", "text", "errors"},
    "backends": {"arithmetic", "arrays", "cache", "errors", "graph", "loading", "models", "native", "numpy"},
}
# The extension has one door, and these are all who use it.
NATIVE = {"native", "arithmetic", "text", "backends", "bench"}


def imports(path: Path) -> set[str]:
    """Modules by their full names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"kvarn.{alias.name}" for alias in node.names} if node.module == "kvarn" else {node.module}
    return found


def part_of(module: str) -> str:
    """The package or the top module that a module of kvarn belongs to."""
    return module.split(".")[1] if "." in module else module


def edges(source: Path) -> dict[str, dict[str, Path]]:
    """part -> what it imports -> a file that does."""
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(source.rglob("*.py")):
        part = path.relative_to(source).parts[0].removesuffix(".py")
        for name in imports(path):
            found.setdefault(part, {}).setdefault(name, path)
    return found


def violations(source: Path = SOURCE) -> list[str]:
    graph = edges(source)
    problems = []
    for part, allowed in ALLOWED.items():
        for name, path in graph.get(part, {}).items():
            ours = name.startswith("kvarn")
            short = name.removeprefix("kvarn.") if ours else name.split(".")[0]
            if short.split(".")[0] == part or (not ours and short in sys.stdlib_module_names):
                continue
            if not any(short == each or short.startswith(f"{each}.") for each in allowed):
                problems.append(f"{path.relative_to(source)}: {part} may not import {name}")
    for part in sorted(set(graph) - NATIVE):
        for name in sorted({"kvarn.native", "kvarn._native"} & graph[part].keys()):
            problems.append(f"{graph[part][name].relative_to(source)}: {part} may not import {name}")
    parts = {part: {part_of(n) for n in names if n.startswith("kvarn.")} - {part} for part, names in graph.items()}
    return problems + [f"a cycle of imports: {' -> '.join(cycle)}" for cycle in cycles(parts)]


def cycles(parts: dict[str, set[str]]) -> list[list[str]]:
    """Each found once, by walking depth first."""
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(part: str, way: list[str]) -> None:
        if part in way:
            found.append([*way[way.index(part) :], part])
            return
        if part not in done:
            for other in sorted(parts.get(part, ())):
                walk(other, [*way, part])
            done.add(part)

    for part in sorted(parts):
        walk(part, [])
    return found


def main() -> int:
    problems = violations(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE)
    print("\n".join(problems) if problems else "imports: clean")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
