"""The target speeds of kvarn on two cores, and the comparison of a measured run with them.

Each run is a `kvarn bench --against llama-cpp-python`: llama.cpp uses its best KV setting, and the
repetitions of the two engines are interleaved. `verdicts` compares the rows with the targets. Two
environment variables name a Python interpreter with llama-cpp-python: KVARN_PEER_PYTHON (built for
AVX-512) and KVARN_PEER_PYTHON_AVX2. If one is not set, its ratios are not measured.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvarn.bench.peers import LLAMA_CPP
from kvarn.loading.paths import models_folder

QWEN = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
AVX512, AVX2 = "KVARN_PEER_PYTHON", "KVARN_PEER_PYTHON_AVX2"


class Run(NamedTuple):
    """One `kvarn bench`."""

    name: str
    flags: str
    peer: str = AVX512  # the variable that names the peer's interpreter
    isa: str | None = None
    model: str = "smollm2"


class Target(NamedTuple):
    what: str
    run: str
    test: str
    least: float | None  # tokens per second
    ratio: float | None  # times the peer
    depth: int = 0
    cache_type: str = "bf16"


RUNS = (
    Run("start", "-p 512 -n 64 -d 0"),
    Run("deep", "-p 0 -n 64 -d 4200 --cache-type bf16,int8"),
    Run("batch", "-p 0 -n 64 -d 128 -b 32"),
    Run("prompt", "-p 4151 -n 0 -d 0"),
    Run("qwen", "-p 0 -n 32 -d 0", model=QWEN),
    Run("avx2", "-p 0 -n 64 -d 0,4200", AVX2, "avx2"),
)
TARGETS = (
    Target("decode @ 0", "start", "tg64", 400, 2),
    Target("decode @ 4.2k", "deep", "tg64", 160, 3, 4200),
    Target("decode, batch 32, ctx 128-192", "batch", "tg64", 1200, 5, 128),
    Target("prefill 512", "start", "pp512", 2500, 2.2),
    Target("prefill 4.2k", "prompt", "pp4151", 1800, 5),
    Target("decode @ 0, Qwen-1.5B Q4_K_M", "qwen", "tg32", 24, 1.5),
    Target("AVX2: decode @ 0", "avx2", "tg64", None, 1),
    Target("AVX2: decode @ 4.2k", "avx2", "tg64", None, 2, 4200),
)


def command(run: Run, repetitions: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    model = str(models_folder() / run.model) if run.model.endswith(".gguf") else run.model
    parts = ["bench", "-m", model, *run.flags.split(), "-t", "2", "-r", str(repetitions), "--json"]
    if python := environment.get(run.peer):
        parts += ["--against", LLAMA_CPP, "--against-python", python]
    return parts


def execute(run: Run, repetitions: int) -> dict[str, Any]:
    """The JSON of the run, or {"error": a line}."""
    environment = os.environ | ({"KVARN_ISA": run.isa} if run.isa else {})
    start = "import sys; from kvarn.cli import main; sys.exit(main())"
    arguments = command(run, repetitions)
    result = subprocess.run([sys.executable, "-c", start, *arguments], env=environment, capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit status {result.returncode}"}
    shown = ["kvarn", *(Path(part).name if part.startswith("/") else part for part in arguments)]
    return {"command": " ".join(shown), "isa": run.isa, **json.loads(result.stdout)}


def verdicts(target: Target, result: dict[str, Any]) -> list[list[str]]:
    """Lines of target, measured, pass: one for the figure and one for the ratio."""
    if "error" in result:
        return [[target.what, "", "", result["error"]]]
    row = find(result, target.test, target.depth, target.cache_type)
    lines = []
    if target.least is not None:
        verdict = "pass" if row["tok_s"] >= target.least else "FAIL"
        lines.append([target.what, f"{target.least:,.0f} tok/s", f"{row['tok_s']:,.0f} tok/s", verdict])
    if target.ratio is not None:
        against = row.get("against")
        measured = f"{against['ratio']:.2f}x of {against['tok_s']:,.0f}" if against else "no peer here"
        verdict = "-" if not against else "pass" if against["ratio"] >= target.ratio else "FAIL"
        what = target.what + (f", against {against['setting']}" if against else "")
        lines.append([what, f"{target.ratio:g}x", measured, verdict])
    return lines


def find(result: dict[str, Any], test: str, depth: int, cache_type: str) -> dict[str, Any]:
    row: dict[str, Any]
    (row,) = (r for r in result["rows"] if (r["test"], r["depth"], r["cache_type"]) == (test, depth, cache_type))
    return row


def aim(result: dict[str, Any]) -> list[str]:
    """Not a promise: int8 cells are half the bytes, so they should be the faster ones."""
    what = "aim: int8 cache @ 4.2k above bf16"
    if "error" in result:
        return [what, "", "", result["error"]]
    int8, bf16 = (find(result, "tg64", 4200, name)["tok_s"] for name in ("int8", "bf16"))
    return [what, f"{bf16:,.0f} tok/s", f"{int8:,.0f} tok/s", "reached" if int8 >= bf16 else "not reached"]
