"""Compares the statistics of `kvarn compare` with those that llama-perplexity prints, on identical logits.

    python scripts/compare_llamacpp.py LLAMA-PERPLEXITY MODEL.gguf TEXT [--types f16,q8_0] [--windows 8] [--out FILE]

llama-perplexity runs the model: first with an f32 cache, saving its 16-bit file of the base, then with
each number type and --kl-divergence. A small library that is loaded into it writes the logits of each run
to a file as they are. kvarn computes its statistics from these logits, in two ways:

    exact    from the logits of the base
    file     from the 16-bit file of the base, as llama-perplexity reads it. The file rounds the logits, and
             raises those that are more than 16 nats below the largest one

`file` must agree with what the tool prints in all digits. Then the difference of `exact` is that of the
file. `kvarn compare` runs on the same text, too, for the table beside it. The tool must be linked to
llama.cpp's shared libraries, as its build does by default. Needs a C compiler.
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

from kvarn.arithmetic import exp, total
from kvarn.arrays import Floats
from kvarn.comparison.divergence import Base, Track
from kvarn.comparison.statistics import FRACTIONS, Statistics, statistics
from kvarn.engine.sampling import log_softmax
from kvarn.engine.scoring import STEP_BYTES, scored_from
from kvarn.loading.checkpoint import open_checkpoint

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
LEAST = -16  # nats: llama-perplexity leaves out smaller probabilities of the base
PRINTED = 5e-6  # six decimals, and per position a sum in f32 of numbers up to 32, whose steps are 2e-6
PERCENT = 1e-3  # three decimals of a percentage
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
    sys.exit(0 if result["agrees"] else "a statistic is not what llama-perplexity prints")


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    library = build_shim(folder)
    saved = folder / "base.bin"
    vocabulary = open_checkpoint(Path(args.model)).config.vocab_size
    count = (WINDOW - 1 - scored_from(WINDOW)) * vocabulary
    run(args, library, folder / "base", "f32", ["--save-all-logits", str(saved)], count)
    tokens, theirs = read_header(saved)
    assert theirs == vocabulary
    base = np.memmap(folder / "base", np.float32).reshape(args.windows, -1, vocabulary)
    rows = {}
    for kind in args.types.split(","):
        said = run(args, library, folder / kind, kind, ["--kl-divergence", "--kl-divergence-base", str(saved)], count)
        other = np.memmap(folder / kind, np.float32).reshape(base.shape)
        exact, file = tracks_of(base, saved, other, tokens)
        ours, rounded = (statistics(track, [True] * len(track.nll)) for track in (exact, file))
        rows[kind] = compared(ours, rounded, said)
        (folder / kind).unlink()
    ours = kvarn_rows(args)
    fine = all(each["within"] for row in rows.values() for each in row.values())
    return {
        "model": Path(args.model).name,
        "text": Path(args.text).name,
        "windows": args.windows,
        "window": WINDOW,
        "agrees": fine,
        "largest_difference_from_exact_kld": max(
            abs(row["Mean    KLD"]["exact"] - row["Mean    KLD"]["llama"]) for row in rows.values()
        ),
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


def file_rows(saved: Path, tokens: int, vocabulary: int) -> np.ndarray:
    """[positions, numbers]: two f32, the step and the smallest log-probability, then 16 bits per token."""
    width = 2 * ((vocabulary + 1) // 2) + 4
    return np.memmap(saved, np.uint16, offset=8 + 4 * (3 + tokens)).reshape(-1, width)


def tracks_of(base: Floats, saved: Path, other: Floats, tokens: Sequence[int]) -> tuple[Track, Track]:
    """`exact` and `file`."""
    exact, file = Track(), Track()
    count, vocabulary = base.shape[1:]
    stored = file_rows(saved, len(tokens), vocabulary)
    height = max(STEP_BYTES // (4 * vocabulary), 1)
    for window in range(len(base)):
        after = window * WINDOW + scored_from(WINDOW) + 1
        for start in range(0, count, height):
            rows = slice(start, min(start + height, count))
            targets = list(tokens[after + rows.start : after + rows.stop])
            theirs = np.array(other[window, rows])
            exact.add(Base(np.array(base[window, rows]), targets), start, theirs)
            add_stored(file, stored[window * count + rows.start : window * count + rows.stop], targets, theirs)
    file.nll = exact.nll
    return exact, file


def add_stored(track: Track, stored: np.ndarray, targets: list[int], logits: Floats) -> None:
    """Position by position, what llama-perplexity computes from its file."""
    for numbers, target, row in zip(stored, targets, logits, strict=True):
        step, least = numbers[:4].view(np.float32)
        base = (step * numbers[4 : 4 + len(row)].astype(np.float32) + least).astype(np.float64)
        ours = log_softmax(row)
        kept = base > LEAST
        track.nll_base.append(float(-base[target]))
        track.kld.append(float(total(exp(base[kept]) * (base[kept] - ours[kept]))))
        track.delta_p.append(float(exp(ours[target : target + 1])[0] - exp(base[target : target + 1])[0]))
        track.same_top.append(bool(base.argmax() == row.argmax()))


def compared(exact: Statistics, file: Statistics, said: str) -> dict[str, dict[str, Any]]:
    """By llama.cpp's name: the values of both tracks and the printed one."""
    found = {}
    ours, rounded = named(exact), named(file)
    for name, (value, most) in rounded.items():
        line, _, which = name.partition("; ")
        theirs = numbers(said, line)[1 if which else 0]
        within = abs(value - theirs) <= most
        found[name] = {"exact": ours[name][0], "file": value, "llama": theirs, "within": within}
    return found


def named(of: Statistics) -> dict[str, tuple[float, float]]:
    """Value, and how far the printed one may be from it."""
    found: dict[str, tuple[float, float]] = {}
    for name, (value, error), factor, most in (
        ("Mean PPL(Q)", of.ppl, 1, PRINTED * of.ppl.value),
        ("Mean PPL(base)", of.ppl_base, 1, PRINTED * of.ppl_base.value),
        ("Mean ln(PPL(Q)/PPL(base))", of.ln_ppl_ratio, 1, PRINTED),
        ("Mean PPL(Q)/PPL(base)", of.ppl_ratio, 1, PRINTED),
        ("Mean PPL(Q)-PPL(base)", of.ppl_difference, 1, PRINTED * of.ppl.value),
        ("Mean    KLD", (of.kld.mean, of.kld.error), 1, PRINTED),
        ("Mean    Δp", (of.delta_p.mean, of.delta_p.error), 100, PERCENT),
        ("RMS Δp", of.delta_p_rms, 100, PERCENT),
        ("Same top p", of.same_top, 100, PERCENT),
    ):
        found[name] = factor * value, most
        found[f"{name}; error"] = factor * error, most
    found["Cor(ln(PPL(Q)), ln(PPL(base)))"] = 100 * of.ppl_correlation, 0.0051
    for key, name in LINES.items():
        if key not in ("p75", "p25"):  # llama.cpp has these of delta-p only
            found[f"{name} KLD"] = getattr(of.kld, key), PRINTED
        found[f"{name} Δp"] = 100 * getattr(of.delta_p, key), PERCENT
    return found


def numbers(said: str, name: str) -> list[float]:
    line = next(line for line in said.splitlines() if re.match(re.escape(name) + r"\s*:", line))
    return [float(each) for each in re.findall(r"-?\d+\.\d+", line.rpartition(":")[2])]


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
        print(f"\nllama.cpp's logits with a cache of {kind}, against f32{'exact':>21} {'file':>12} {'llama.cpp':>12}")
        for name, each in found.items():
            mark = "" if each["within"] else "  DIFFERS"
            print(f"{name:<40} {each['exact']:>12.6f} {each['file']:>12.6f} {each['llama']:>12.6f}{mark}")
    print("\nkvarn compare")
    for name, facts in result["kvarn_compare"].items():
        print(f"{name:<16} " + "  ".join(f"{key} {value:.6f}" for key, value in facts.items()))


if __name__ == "__main__":
    main()
