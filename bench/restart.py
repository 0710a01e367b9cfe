"""Measures the time to the first token of a long conversation after a restart: from the disk cache against recomputed.

python bench/restart.py [--tokens 3000] [--json FILE] MODEL ...

For each model a first process computes the history and stores it. Then new processes get the history and a new
question: without a disk cache, with one whose files are in the page cache, and with one whose files must be read from
the device. The answers are compared: token and log-probabilities must be equal. Times are medians.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from kvarn import LLM, SamplingParams
from kvarn.backends.pool import default_threads
from kvarn.bench.machine import Bandwidth, facts

QUESTION = "\nNow answer in one word: what was this text about?"
WAYS = ("recomputed", "page cache", "disk")


def history(llm: LLM, n_tokens: int) -> list[int]:
    tokens: list[int] = []
    for i in itertools.count():
        tokens += llm.tokenizer.encode(f"Note {i}: visitor {i * 37 % 101} asked for room {i * 53 % 97}.")
        if len(tokens) >= n_tokens:
            break
    return tokens[:n_tokens]


def one(model: str, n_tokens: int, folder: str | None, ask: bool) -> dict[str, Any]:
    """In a process of its own: load, prompt, first token."""
    start = time.perf_counter()
    with LLM(model, cache="paged", context=4096, max_seqs=1, disk_cache=folder, backend="cpu") as llm:
        loaded = time.perf_counter() - start
        prompt = history(llm, n_tokens) + (llm.tokenizer.encode(QUESTION) if ask else [])
        start = time.perf_counter()
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, logprobs=3, temperature=0))
        seconds = time.perf_counter() - start
        first = output.completions[0]
        return {
            "seconds": round(seconds, 4),
            "load_seconds": round(loaded, 3),
            "prompt_tokens": len(prompt),
            "reused_tokens": output.cached_tokens,
            "answer": [first.tokens, [each.logprob for each in first.logprobs]],
        }


def child(model: str, n_tokens: int, folder: str | None, ask: bool = True) -> dict[str, Any]:
    wanted = json.dumps([model, n_tokens, folder, ask])
    found = subprocess.run([sys.executable, __file__, "--one", wanted], check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


def forget_pages(folder: str) -> None:
    """Write the files to the device and drop them from the page cache."""
    for path in Path(folder).rglob("*.kvb"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def measure(model: str, n_tokens: int, times: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        child(model, n_tokens, folder, ask=False)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.kvb"))
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        runs["recomputed"].append(child(model, n_tokens, None))
        for _ in range(times):
            for way in WAYS[1:]:
                with tempfile.TemporaryDirectory() as copy:  # a run stores the question, too
                    shutil.copytree(folder, copy, dirs_exist_ok=True)
                    if way == "disk":
                        forget_pages(copy)
                    runs[way].append(child(model, n_tokens, copy))
    answers = {json.dumps(run.pop("answer")) for found in runs.values() for run in found}
    assert len(answers) == 1, "the answers differ"
    middle = {way: round(median(run["seconds"] for run in found), 4) for way, found in runs.items()}
    faster = {way: round(middle["recomputed"] / middle[way], 1) for way in WAYS[1:]}
    return {"model": Path(model).name, "stored_bytes": size, "seconds": middle, "faster": faster, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--times", type=int, default=3, help="runs of each way that reads (default: 3)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--ids", action="store_true", help="print history and question as token ids, for other engines")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(*json.loads(args.one))))
        return
    if args.ids:
        with LLM(args.models[0], context=64, backend="cpu") as llm:
            print(*history(llm, args.tokens))
            print(*llm.tokenizer.encode(QUESTION))
        return
    rows = []
    print(f"{'model':<24} {'stored':>9}  " + "  ".join(f"{way:>12}" for way in WAYS) + "   times faster")
    for model in args.models or ["smollm2"]:
        row = measure(model, args.tokens, args.times)
        rows.append(row)
        times = "  ".join(f"{row['seconds'][way]:>10.3f} s" for way in WAYS)
        faster = " / ".join(f"{row['faster'][way]:.0f}" for way in WAYS[1:])
        print(f"{Path(model).name:<24} {row['stored_bytes'] / 1e6:>6.0f} MB  {times}   {faster}", flush=True)
    if args.json:
        command = " ".join(["python", "bench/restart.py", *sys.argv[1:]])
        machine = facts(Bandwidth(default_threads()))
        whole = {"command": command, "tokens": args.tokens, "machine": machine, "models": rows}
        Path(args.json).write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
