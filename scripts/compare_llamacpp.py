"""Compares the statistics of `kvarn compare` with those that llama-perplexity prints, on identical logits.

    python scripts/compare_llamacpp.py LLAMA-PERPLEXITY MODEL.gguf TEXT [--types f16,q8_0] [--windows 8] [--out FILE]

llama-perplexity runs the model: first with an f32 cache, saving its 16-bit file of the base, then with
each number type and --kl-divergence. A small library that is loaded into it writes the logits of each run
to a file as they are. kvarn computes its statistics from these logits. The differences must be within the
rounding of the 16-bit file. `kvarn compare` then runs on the same text, for the table beside it. The tool
must be linked to llama.cpp's shared libraries, as its build does by default. Needs a C compiler.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvarn.arrays import Floats
from kvarn.comparison.divergence import Base, Track
from kvarn.comparison.statistics import FRACTIONS, Statistics, statistics
from kvarn.engine.scoring import STEP_BYTES, scored_from

WINDOW = 512
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
struct llama_context;
float * llama_get_logits_ith(struct llama_context * context, int32_t i) {
    float * (*next)(struct llama_context *, int32_t) = dlsym(RTLD_NEXT, "llama_get_logits_ith");
    float * logits = next(context, i);
    FILE * file = fopen(getenv("LOGITS_FILE"), "ab");
    if (!file || fwrite(logits, sizeof(float), atoll(getenv("LOGITS_COUNT")), file) == 0) abort();
    fclose(file);
    return logits;
}
"""
STEP = 16 / 65535  # nats between two numbers of the 16-bit file: it holds the 16 nats below the largest logit
PRINTED = 1.1e-6  # of KLD and PPL: six decimals, and sums in f32
PERCENT = 0.0011  # of probabilities: three decimals of a percentage
LINES = {"max": "Maximum", "median": "Median ", "min": "Minimum"} | {
    name: f"{100 * fraction:4.1f}%  " for name, fraction in FRACTIONS.items() if name != "median"
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tool", help="llama-perplexity")
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--types", default="f16,bf16,q8_0", help="number types of llama.cpp's cache")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", help="JSON file for the result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = compare(args, Path(folder))
    show(result)
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if result["within_rounding"] else "a statistic differs by more than the rounding of the 16-bit file")


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    library = build_shim(folder)
    saved = folder / "base.bin"
    run(args, library, folder / "base", "f32", ["--save-all-logits", str(saved)], 1)
    tokens, vocabulary = read_header(saved)
    for old in folder.glob("base"):
        old.unlink()
    count = (WINDOW - 1 - scored_from(WINDOW)) * vocabulary
    run(args, library, folder / "base", "f32", ["--save-all-logits", str(saved)], count)
    base = np.memmap(folder / "base", np.float32).reshape(args.windows, -1, vocabulary)
    rows = {}
    for kind in args.types.split(","):
        said = run(args, library, folder / kind, kind, ["--kl-divergence", "--kl-divergence-base", str(saved)], count)
        other = np.memmap(folder / kind, np.float32).reshape(base.shape)
        track, ties = track_of(base, other, tokens)
        rows[kind] = compared(statistics(track, [True] * len(track.nll)), said, ties / len(track.nll))
        (folder / kind).unlink()
    ours = kvarn_rows(args)
    fine = all(each["within"] for row in rows.values() for each in row.values())
    return {
        "model": Path(args.model).name,
        "text": Path(args.text).name,
        "windows": args.windows,
        "window": WINDOW,
        "within_rounding": fine,
        "identical_logits": rows,
        "kvarn_compare": ours,
    }


def build_shim(folder: Path) -> Path:
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def run(args: argparse.Namespace, library: Path, logits: Path, kind: str, rest: Sequence[str], count: int) -> str:
    command = [args.tool, "-m", args.model, "-f", args.text, "-c", str(WINDOW), "-b", str(WINDOW), "-fa", "on"]
    command += ["--chunks", str(args.windows), "-t", str(args.threads), "-ctk", kind, "-ctv", kind, *rest]
    shim = {"LD_PRELOAD": str(library), "LOGITS_FILE": str(logits), "LOGITS_COUNT": str(count)}
    done = subprocess.run(command, env=os.environ | shim, capture_output=True, text=True)
    if done.returncode or not logits.exists():
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def read_header(saved: Path) -> tuple[list[int], int]:
    """Tokens and size of the vocabulary, from the 16-bit file of the base."""
    with saved.open("rb") as file:
        assert file.read(8) == b"_logits_"
        window, vocabulary, chunks = np.fromfile(file, np.int32, 3).tolist()
        return np.fromfile(file, np.int32, window * chunks).tolist(), vocabulary


def track_of(base: Floats, other: Floats, tokens: Sequence[int]) -> tuple[Track, int]:
    """And at how many positions the 16-bit file may have another top token: the two largest logits are too near."""
    track, ties = Track(), 0
    first, height = scored_from(WINDOW), max(STEP_BYTES // (4 * base.shape[2]), 1)
    for window in range(len(base)):
        for start in range(0, base.shape[1], height):
            rows = slice(start, min(start + height, base.shape[1]))
            after = window * WINDOW + first + 1
            part = np.array(base[window, rows])
            track.add(
                Base(part, list(tokens[after + rows.start : after + rows.stop])), start, np.array(other[window, rows])
            )
            largest = np.sort(np.partition(part, -2)[:, -2:])
            ties += int(np.count_nonzero(largest[:, 1] - largest[:, 0] <= STEP))
    return track, ties


def compared(ours: Statistics, said: str, ties: float) -> dict[str, dict[str, Any]]:
    """By llama.cpp's name: both values, and whether they differ by no more than half a step of the 16-bit file."""
    half, share = STEP / 2, 100 * STEP / 2 + PERCENT
    rows = {
        "Mean PPL(Q)": (ours.ppl, 1e-5 * ours.ppl.value),
        "Mean PPL(base)": (ours.ppl_base, (half + 1e-5) * ours.ppl_base.value),
        "Mean ln(PPL(Q)/PPL(base))": (ours.ln_ppl_ratio, half + PRINTED),
        "Mean PPL(Q)/PPL(base)": (ours.ppl_ratio, (half + PRINTED) * ours.ppl_ratio.value),
        "Mean PPL(Q)-PPL(base)": (ours.ppl_difference, (half + 1e-5) * ours.ppl_base.value),
        "Mean    KLD": ((ours.kld.mean, ours.kld.error), half + PRINTED),
        "Mean    Δp": ((100 * ours.delta_p.mean, 100 * ours.delta_p.error), share),
        "RMS Δp": ((100 * ours.delta_p_rms.value, 100 * ours.delta_p_rms.error), share),
        "Same top p": ((100 * ours.same_top.value, 100 * ours.same_top.error), 100 * ties + PERCENT),
    }
    found = {}
    for name, ((value, error), most) in rows.items():
        theirs, their_error = numbers(said, name, 2)
        found[name] = row(value, theirs, most)
        found[f"{name}, error"] = row(error, their_error, most)
    found["Cor(ln(PPL(Q)), ln(PPL(base)))"] = row(
        100 * ours.ppl_correlation, *numbers(said, "Cor(ln(PPL(Q)), ln(PPL(base)))", 1), 0.0051
    )
    for key, name in LINES.items():
        if key not in ("p75", "p25"):  # llama.cpp has these of delta-p only
            found[f"{name} KLD"] = row(getattr(ours.kld, key), *numbers(said, f"{name} KLD", 1), half + PRINTED)
        found[f"{name} Δp"] = row(100 * getattr(ours.delta_p, key), *numbers(said, f"{name} Δp", 1), share)
    return found


def row(ours: float, theirs: float, most: float) -> dict[str, Any]:
    difference = abs(ours - theirs)
    return {"kvarn": ours, "llama": theirs, "difference": difference, "most": most, "within": difference <= most}


def numbers(said: str, name: str, n: int) -> list[float]:
    line = next(line for line in said.splitlines() if re.match(re.escape(name) + r"\s*:", line))
    return [float(each) for each in re.findall(r"-?\d+\.\d+", line.rpartition(":")[2])][:n]


def kvarn_rows(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The same windows, with kvarn's own kernels."""
    command = [sys.executable, "-m", "kvarn", "compare", "-m", args.model, "-f", args.text, "-c", str(WINDOW), "--json"]
    command += ["--windows", str(args.windows), "-n", "0", "-t", str(args.threads)]
    rows = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["rows"]
    return {
        each["name"]: {
            "PPL(Q)": each["statistics"]["ppl"]["value"],
            "Mean KLD": each["statistics"]["kld"]["mean"],
            "99.0% KLD": each["statistics"]["kld"]["p99"],
            "Same top p": 100 * each["statistics"]["same_top"]["value"],
        }
        for each in rows
    }


def show(result: dict[str, Any]) -> None:
    for kind, found in result["identical_logits"].items():
        print(f"\nllama.cpp's logits with a cache of {kind}, against f32")
        for name, each in found.items():
            mark = "" if each["within"] else "  TOO FAR"
            print(f"{name:<40} {each['kvarn']:>12.6f} {each['llama']:>12.6f}  {each['difference']:.1e}{mark}")
    print("\nkvarn compare")
    for name, facts in result["kvarn_compare"].items():
        print(f"{name:<16} " + "  ".join(f"{key} {value:.6f}" for key, value in facts.items()))


if __name__ == "__main__":
    main()
