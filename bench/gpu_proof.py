"""Proves the CUDA backend on a GPU: kernels, attention, bits, stored cells, memory, a real model; measures its speed.

    python bench/gpu_proof.py [--only kernels,bits] [--quick] [--model SmolLM2.gguf] [--text wiki.test.raw]

prints a line per check and writes one JSON file, after every check. The exit status is 1 if a case failed.
It needs a GPU and kvarn with its dependencies, and no network. With `--interpret` it needs Triton instead
of a GPU, and all cases are tiny. The sections are in bench/proof/.
"""

import argparse
import platform
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from kvarn import __version__

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # tiny models, launches and oracles

from proof.report import Report  # noqa: E402
from proof.site import Site, open_site  # noqa: E402

from kvarn.errors import KvarnError  # noqa: E402

SECTIONS = ("selftest", "kernels", "conformance", "bits", "codes", "lasting", "memory", "real", "speed")
OUT = ROOT / "bench" / "results" / "gpu-proof.json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="SECTION,..", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--interpret", action="store_true", help="in Triton's interpreter, without a GPU")
    parser.add_argument("--model", type=Path, help="a GGUF file of SmolLM2 135M, Q4_1")
    parser.add_argument("--text", type=Path, help="a text for perplexity, such as WikiText's test set")
    parser.add_argument("--out", type=Path, default=OUT, help=f"the JSON file (default: {OUT.relative_to(ROOT)})")
    args = parser.parse_args(arguments)
    names = args.only.split(",")
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"unknown section {unknown.pop()!r}; there are: {', '.join(SECTIONS)}")
    site = open_site(args.interpret, args.quick, args.model, args.text)
    report = Report(args.out, facts(site, sys.argv if arguments is None else [__file__, *arguments]))
    for report.section in (name for name in SECTIONS if name in names):
        import_module(f"proof.{report.section}").run(site, report)
    report.write()
    done = f"{len(report.checks)} checks, {sum(check.cases for check in report.checks)} cases"
    print(f"{done}, {report.failures} failed; not done: {', '.join(report.not_done) or 'nothing'}; {args.out}")
    return int(report.failures > 0)


def facts(site: Site, command: list[str]) -> dict[str, Any]:
    return {
        "device": site.backend.facts(),
        "kvarn": __version__,
        "commit": commit(),
        "command": shlex.join(["python", "bench/gpu_proof.py", *(Path(word).name for word in command[1:])]),
        "size": site.size,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def commit() -> str:
    try:
        said = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said.stdout.strip()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KvarnError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
