"""Runs llama.cpp's own tests of its server, unchanged, against kvarn, and writes docs/llama-tests.md.

    python tests/peers/run.py SOURCE --stories stories15M.bin --vocabulary ggml-vocab-llama-spm.gguf [--only FILE ...]

SOURCE is a source tree of llama.cpp. Each test starts `kvarn serve` with its own flags (llama_server.py takes the
place of llama-server). The environment of the tests is build/peers/venv; `make test-peers` makes it. A failure is
counted apart if reasons.py says why; any other failure makes the exit status 1. With --only, the named files run, and
the page has the last results of the others.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import reasons

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "peers"
FILES = (
    *("basic", "chat_completion", "completion", "tokenize", "compat_anthropic", "compat_oai_responses", "template"),
    *("stream", "security", "tool_call", "embedding", "infill"),
)
SMALL = "without_tool_call_slow"  # marked as slow, but with the small model
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"


class Result(NamedTuple):
    file: str
    test: str
    outcome: str  # PASSED, SKIPPED, FAILED, or a kind of reasons.py
    why: str = ""


def run_file(name: str, source: Path, environment: dict[str, str]) -> list[Result]:
    """Tests that are marked as slow need large models by name, but for a few. As in llama.cpp's CI they do not run."""
    reports = [
        run_pytest(name, source, environment, "-m", "not slow"),
        run_pytest(name, source, environment, "-m", "slow", "-k", SMALL),
    ]
    slow = pytest(name, source, environment, "--collect-only", "-m", "slow", "-k", f"not {SMALL}").stdout
    left_out = [line.split("::")[-1] for line in slow.splitlines() if "::" in line]
    asked = flags_by_test(Path(environment["KVARN_PEER_NOTES"]))
    return [
        *(judged(name, case, asked) for report in reports for case in report.iter("testcase")),
        *(Result(name, test, reasons.MODEL, "needs a large model by its name; marked as slow") for test in left_out),
    ]


def run_pytest(name: str, source: Path, environment: dict[str, str], *flags: str) -> xml.ElementTree:
    report = BUILD / f"{name}.xml"
    report.unlink(missing_ok=True)
    done = pytest(name, source, environment, "--tb=short", f"--junitxml={report}", "-o", "junit_logging=no", *flags)
    if not report.exists():
        sys.exit(f"{name}: no report\n{done.stdout[-2000:]}")
    return xml.parse(report)


def pytest(name: str, source: Path, environment: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(BUILD / "venv" / "bin" / "python"), "-m", "pytest", f"unit/test_{name}.py", "-q"]
    command += ["-p", "no:cacheprovider", *flags]
    folder = source / "tools" / "server" / "tests"
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def flags_by_test(notes: Path) -> dict[str, list[str]]:
    """Flags that the last server of each test was given and kvarn does not have."""
    lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    return {line["test"].split("::")[-1].rsplit(" (", 1)[0]: line["unknown"] for line in lines}


def judged(file: str, case: xml.Element, asked: dict[str, list[str]]) -> Result:
    test = case.get("name", "")
    if case.find("skipped") is not None:
        return Result(file, test, SKIPPED)
    problem = next((each for each in (case.find("failure"), case.find("error")) if each is not None), None)
    if problem is None:
        return Result(file, test, PASSED)
    trace = f"{problem.get('message', '')}\n{problem.text or ''}"
    kind, why = reasons.find(f"{file}::{test}", trace, asked.get(test, []))
    return Result(file, test, kind or FAILED, why or trace.strip().splitlines()[0][:200])


def table(results: list[Result]) -> str:
    names = (PASSED, *reasons.KINDS, FAILED, SKIPPED)
    rows = ["| file | tests | " + " | ".join(reasons.TITLES.get(name, name) for name in names) + " |"]
    rows.append("|---|" + "---|" * (len(names) + 1))
    for file in (*dict.fromkeys(each.file for each in results), "all"):
        counts = Counter(each.outcome for each in results if file in (each.file, "all"))
        rows.append(f"| {file} | {counts.total()} | " + " | ".join(str(counts[name] or "") for name in names) + " |")
    return "\n".join(rows)


def page(results: list[Result], commit: str, missing: list[str]) -> str:
    parts = [reasons.HEAD.format(commit=commit), table(results), ""]
    if missing:
        parts += [f"Not run yet: {', '.join(missing)}.", ""]
    for kind in (*reasons.KINDS, FAILED):
        found = Counter((each.file, each.test.split("[")[0], each.why) for each in results if each.outcome == kind)
        if found:
            parts += [f"## {reasons.TITLES.get(kind, kind).capitalize()}", "", reasons.ABOUT.get(kind, ""), ""]
            parts += ["| file | test | how many | why |", "|---|---|---|---|"]
            parts += [f"| {file} | `{test}` | {n} | {why} |" for (file, test, why), n in found.items()]
            parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def free_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--stories", type=Path, required=True)
    parser.add_argument("--vocabulary", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE")
    given = parser.parse_args()
    models, notes, launcher = BUILD / "models", BUILD / "notes.jsonl", BUILD / "llama-server"
    models.mkdir(parents=True, exist_ok=True)
    notes.unlink(missing_ok=True)
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "llama_server.py"}" "$@"\n')
    launcher.chmod(0o755)
    environment = os.environ | {
        "LLAMA_SERVER_BIN_PATH": str(launcher),
        "KVARN_PEER_NOTES": str(notes),
        "KVARN_PEER_MODELS": str(models),
        "KVARN_PEER_STORIES": str(given.stories.resolve()),
        "KVARN_PEER_VOCABULARY": str(given.vocabulary.resolve()),
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PORT": os.environ.get("PORT") or free_port(),
    }
    failed = 0
    for name in given.only or FILES:
        found = run_file(name, given.source.resolve(), environment)
        keep(name, found)
        print(name, dict(Counter(each.outcome for each in found)), flush=True)
        for each in found:
            if each.outcome == FAILED:
                failed += 1
                print(f"  {each.test}: {each.why}")
    write_page(head(given.source))
    return int(failed > 0)


def keep(name: str, found: list[Result]) -> None:
    (BUILD / f"{name}.json").write_text(json.dumps([each._asdict() for each in found]))


def write_page(commit: str) -> None:
    """From the last results of every file. Those that were never run here are named."""
    kept = {name: BUILD / f"{name}.json" for name in FILES}
    missing = [name for name, path in kept.items() if not path.exists()]
    found = [json.loads(path.read_text()) for name, path in kept.items() if name not in missing]
    results = [Result(**each) for file in found for each in file]
    (ROOT / "docs" / "llama-tests.md").write_text(page(results, commit, missing))
    stored = {"commit": commit, "not run": missing, "results": [each._asdict() for each in results]}
    (ROOT / "bench" / "results" / "llama-tests.json").write_text(json.dumps(stored, indent=1) + "\n")


def head(source: Path) -> str:
    """The commit of a checkout, or what the file COMMIT of an unpacked archive says."""
    if (source / "COMMIT").exists():
        return (source / "COMMIT").read_text().strip()
    asked = ["git", "-C", str(source), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
