"""Checks which part of kvarn imports which. `make check` runs it.

    python scripts/imports.py [SOURCE]

A part is a package or a top-level module of kvarn. ALLOWED lists, for some parts, everything that they may
import from kvarn and from other packages. The import graph over all parts must have no cycle.
"""

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "kvarn"
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "words": set(),
    "arrays": {"numpy"},
    "native": {"_native", "errors"},
    "arithmetic": {"arrays", "native", "numpy"},
    "cache": {"errors", "words"},  # integers: no array, no device, no extension
    "graph": {"errors"},
    "settings": {"errors", "numpy"},
    "models": {"graph", "cache.spec", "settings", "errors", "numpy"},
    "text": {"settings", "errors", "words", "native", "numpy", "jinja2", "tokenizers"},
    "dialect": {"text.chat", "errors"},  # text in, text out: no engine, no server
    "loading": {"arrays", "errors", "words", "settings", "models", "graph"}
    | {"numpy", "gguf", "safetensors", "huggingface_hub"},
    # The engine works on token ids: no text, no HTTP, no metrics, and only the interface of backends.
    "engine": {"arithmetic", "arrays", "backends.base", "cache", "errors", "structured.structure", "words", "numpy"},
    # llguidance is imported in one module, when the first structure is compiled.
    "structured": {"arrays", "errors", "text", "numpy", "llguidance"},
    # Tools, reasoning and structures of a conversation, on top of dialects and structures.
    "chats": {"dialect", "structured", "engine.constraint", "text", "errors"},
    "jobs": {"arrays", "chats", "dialect", "engine", "structured", "text", "errors", "words"},
    # Caches on one model and one text. It prints nothing: no flags, no tables.
    "comparison": {"arithmetic", "arrays", "backends", "bench", "cache", "engine", "errors", "llm"}
    | {"loading.progress", "words", "numpy"},
    # Forecasts: sizes and speeds of models that need not be loaded.
    "forecast": {"arrays", "backends", "bench", "cache", "engine", "errors", "graph", "llm", "loading", "models"}
    | {"__version__", "numpy"},
    # Cells outside of the process: no text, no requests.
    "lasting": {"arithmetic", "arrays", "backends.base", "cache", "loading", "models", "errors", "words", "numpy"},
    "snapshots": {"__version__", "engine", "jobs", "lasting", "text", "errors", "words"},
    "backends": {"arithmetic", "arrays", "cache", "errors", "graph", "loading", "models", "native", "words"}
    | {"numpy", "triton", "cuda"},
}
# Only these parts may import the native extension.
NATIVE = {"native", "arithmetic", "text", "backends", "bench"}


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"kvarn.{alias.name}" for alias in node.names} if node.module == "kvarn" else {node.module}
    return names


def part_of(module: str) -> str:
    """The package or top-level module of kvarn that a module belongs to."""
    return module.split(".")[1] if "." in module else module


def edges(source: Path) -> dict[str, dict[str, Path]]:
    """part -> imported module -> one file that imports it."""
    graph: dict[str, dict[str, Path]] = {}
    for path in sorted(source.rglob("*.py")):
        part = path.relative_to(source).parts[0].removesuffix(".py")
        for name in imports(path):
            graph.setdefault(part, {}).setdefault(name, path)
    return graph


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
    """The cycles of the graph, by depth-first search."""
    result: list[list[str]] = []
    done: set[str] = set()

    def walk(part: str, path: list[str]) -> None:
        if part in path:
            result.append([*path[path.index(part) :], part])
            return
        if part not in done:
            for other in sorted(parts.get(part, ())):
                walk(other, [*path, part])
            done.add(part)

    for part in sorted(parts):
        walk(part, [])
    return result


def main() -> int:
    problems = violations(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE)
    print("\n".join(problems) if problems else "imports: clean")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
