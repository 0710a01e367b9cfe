"""Measures what codecs lose: kvarn's on its reference backend, llama.cpp's with its own program, on the same text.

    python bench/codec_table.py --text wiki.test.raw [--llama-perplexity PATH] smollm2:2 gemma.gguf:2

For each MODEL:WINDOWS, windows of 512 tokens are read with the cells of every codec and compared with those of the
base: f32 cells in kvarn, f16 cells in llama.cpp (`--kl-divergence`). llama.cpp gets a copy with f32 weights, because
it rounds activations where weights are quantized, which moves logits more than a good codec does; the reference rounds
nothing but cells. The second half of each window is scored. It
writes bench/results/codecs.json and docs/images/codecs.svg, and prints the table of docs/codecs.md. Rows that the JSON
file has, from the same arithmetic, are not measured again: to add a codec costs that codec and the base.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from codec_plot import NAMES, plot

from kvarn import LLM, arithmetic
from kvarn.cache.codec import cache_types, codecs_of
from kvarn.comparison.candidate import BASE, allocate
from kvarn.comparison.divergence import Base
from kvarn.comparison.statistics import statistics
from kvarn.engine.scoring import read, scored_from, windows
from kvarn.errors import KvarnError
from kvarn.loading.pull import resolve

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from widen_gguf import widen  # noqa: E402

RESULTS, PLOT = ROOT / "bench" / "results" / "codecs.json", ROOT / "docs" / "images" / "codecs.svg"
WINDOW = 512
OURS = ("f16", "bf16", "int8", "int6", "int8/int4", "int4")  # as far as this kvarn has them
THEIRS = {"bf16": 16.0, "q8_0": 8.5, "q5_0": 5.5, "q4_0": 4.5}  # bits per number
NUMBER = r"\s*:\s*([\d.]+|nan)"
PATTERNS = {
    "kld": rf"Mean\s+KLD{NUMBER}",
    "kld_error": rf"Mean\s+KLD{NUMBER}\s*±\s*([\d.]+)",
    "p99": rf"99\.0%\s+KLD{NUMBER}",
    "same_top": rf"Same top p{NUMBER}",
    "ppl_ratio": rf"Mean PPL\(Q\)/PPL\(base\){NUMBER}",
}
Row = dict[str, Any]


def bits(cache_type: str, llm: LLM) -> float:
    """Per stored number, with scales."""
    pair, total, stored = codecs_of(cache_type), 0, 0
    for spec in llm.config.layer_specs:
        total += spec.k_dim + spec.v_dim
        stored += pair.k.row(spec.k_dim).nbytes + pair.v.row(spec.v_dim).nbytes
    return 8 * stored / total


def ours(model: Path, text: str, n_windows: int, types: Sequence[str]) -> list[Row]:
    """All codecs in lockstep, on the backend that rounds nothing but cells."""
    llm = LLM(model, backend="reference", cache="contiguous", cache_type="f32", context=WINDOW, max_seqs=1)
    tokenizer = llm.tokenizer
    cut = windows(tokenizer.encode(text), WINDOW, n_windows, tokenizer.bos_id if tokenizer.add_bos else None)
    setups = [replace(BASE, cache_type=name) for name in ("f32", *types)]
    candidates = allocate(llm, setups, WINDOW)
    for number, window in enumerate(cut, 1):
        base, *others = [
            read(llm.program, c.memory, c.cache, window.tokens, scored_from(WINDOW), WINDOW) for c in candidates
        ]
        for start, logits in base:
            step = Base(logits, window.targets[start : start + len(logits)])
            for each, reader in zip(candidates[1:], others, strict=True):
                each.track.add(step, start, next(reader)[1])
        print(f"{model.name}: {number} of {len(cut)} windows, {', '.join(types)}", flush=True)
    rows = []
    for each in candidates[1:]:
        found = statistics(each.track, [True] * len(each.track.kld))
        rows.append(
            {
                "engine": "kvarn",
                "type": each.setup.cache_type,
                "bits": round(bits(each.setup.cache_type, llm), 3),
                "kld": found.kld.mean,
                "kld_error": found.kld.error,
                "p99": found.kld.p99,
                "same_top": found.same_top.value,
                "ppl_ratio": found.ppl_ratio.value,
                "predictions": found.positions,
                "arithmetic": arithmetic.VERSION,
            }
        )
    return rows


def theirs(program: Path, model: Path, text: Path, n_windows: int, types: Sequence[str]) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        base, wide = str(Path(folder) / "logits"), Path(folder) / "wide.gguf"
        widen(model, wide)
        common = [str(program), "-m", str(wide), "-f", str(text), "-c", str(WINDOW), "--chunks", str(n_windows)]
        common += ["-fa", "on", "--kl-divergence-base", base]
        _run([*common, "-ctk", "f16", "-ctv", "f16"])
        for name in types:
            said = _run([*common, "--kl-divergence", "-ctk", name, "-ctv", name])
            found = {key: _number(pattern, said) for key, pattern in PATTERNS.items()}
            found["same_top"] /= 100
            predictions = n_windows * (WINDOW - 1 - scored_from(WINDOW))
            rows.append(
                {"engine": "llama.cpp", "type": name, "bits": THEIRS[name], **found, "predictions": predictions}
            )
            print(f"llama.cpp {name}: {found}", flush=True)
    return rows


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise KvarnError(f"{Path(command[0]).name} ended: {(done.stdout + done.stderr).strip()[-500:]}")
    return done.stdout + done.stderr


def _number(pattern: str, said: str) -> float:
    found = re.search(pattern, said)
    if found is None:
        raise KvarnError(f"llama-perplexity did not print what {pattern!r} looks for")
    return float(found.groups()[-1])


def missing(rows: Sequence[Row], model: str, engine: str, types: Sequence[str], n_windows: int) -> list[str]:
    have = set()
    for row in rows:
        current = engine != "kvarn" or row["arithmetic"] == arithmetic.VERSION
        if (row["model"], row["engine"], row["windows"]) == (model, engine, n_windows) and current:
            have.add(row["type"])
    return [name for name in types if name not in have]


def table(rows: Sequence[Row]) -> str:
    """In Markdown: bits and, for each model, KLD, its 99th percentile and the share of equal tokens."""
    models = [model for model in NAMES if any(row["model"] == model for row in rows)]
    heads = [f"{NAMES[model].partition(',')[0]}: KLD | 99 % | same token" for model in models]
    lines = ["| codec | bits | " + " | ".join(heads) + " |"]
    lines.append("|---|---" + "|---|---|---" * len(models) + "|")
    codecs: dict[tuple[str, str], dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: (row["engine"], -row["bits"])):
        codecs.setdefault((row["engine"], row["type"]), {})[row["model"]] = row
    for (engine, name), found in codecs.items():
        sizes = sorted({row["bits"] for row in found.values()})
        cells = [f"{engine} `{name}`", " to ".join(f"{each:g}" for each in dict.fromkeys((sizes[0], sizes[-1])))]
        for model in models:
            cells += _cells(found[model]) if model in found else ["", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    return [f"{row['kld']:.2g} ±{row['kld_error']:.1g}", f"{row['p99']:.2g}", f"{100 * row['same_top']:.1f} %"]


def update(whole: dict[str, Any], model: Path, windows: int, rows: Sequence[Row]) -> None:
    """Put new rows into the file in the place of older ones."""
    for row in rows:
        row |= {"model": model.name, "windows": windows}
        same = ("model", "engine", "type")
        whole["rows"] = [old for old in whole["rows"] if any(old[key] != row[key] for key in same)] + [row]
    whole["rows"].sort(key=lambda row: (row["model"], row["engine"], -row["bits"]))
    RESULTS.write_text(json.dumps(whole, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL:WINDOWS", help="without one, only the picture is drawn")
    parser.add_argument("--text", type=Path, help="such as WikiText-2's test set")
    parser.add_argument("--llama-perplexity", type=Path, metavar="PATH", help="llama.cpp's program")
    args = parser.parse_args()
    if args.models and args.text is None:
        parser.error("give the text with --text")
    whole = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"window": WINDOW, "rows": []}
    for word in args.models:
        name, _, count = word.rpartition(":")
        model, n_windows = resolve(name), int(count)
        types = missing(whole["rows"], model.name, "llama.cpp", list(THEIRS), n_windows)
        if types and args.llama_perplexity is not None:
            update(
                whole, model, n_windows, theirs(args.llama_perplexity.absolute(), model, args.text, n_windows, types)
            )
        if types := missing(whole["rows"], model.name, "kvarn", [n for n in OURS if n in cache_types()], n_windows):
            update(whole, model, n_windows, ours(model, args.text.read_text(encoding="utf-8"), n_windows, types))
    PLOT.write_text(plot(whole["rows"]), encoding="utf-8")
    print(table(whole["rows"]))


if __name__ == "__main__":
    try:
        main()
    except KvarnError as error:
        sys.exit(f"codec_table.py: {error}")
