"""Measures the whole engine on a GPU with random weights, beside recorded speeds of other engines.

    python bench/gpu_speed.py [--models 1.1B-BF16,8B-Q4_K_M] [--quick] [--folder DIR]

For each model: decode at three depths, in batches of 32 and 128, a prompt of 4,096 tokens, the time of the
operations of a decode step, the memory that was predicted and used, and the time from the start of a process
to its first token. Writes one JSON file, after every model.
"""

import argparse
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import random_model
from start import first_byte

from kvarn import LLM
from kvarn.backends.cuda.limits import weight_bytes
from kvarn.bench import suite
from kvarn.bench.case import Case
from kvarn.bench.machine import Bandwidth
from kvarn.bench.peers.recorded import Recorded, main_type
from kvarn.bench.subject import ENDLESS, Setup
from kvarn.cli.table import print_table
from kvarn.loading.checkpoint import open_checkpoint

RESULTS = Path(__file__).resolve().parent / "results"
MODELS = ("1.1B-BF16", "8B-BF16", "1.1B-Q4_K_M", "8B-Q4_K_M")
CASES = [
    *(Case("tg", 64, depth) for depth in (128, 4096, 32_000)),
    Case("tg", 32, 1024, 32),
    Case("tg", 32, 1024, 128),
    Case("pp", 4096),
]
QUICK = [Case("tg", 16, 128), Case("pp", 512)]
CHUNK = 4096  # most tokens of a step


def measure(path: Path, cases: list[Case], repetitions: int, table: Path, backend: str) -> dict[str, Any]:
    began = time.perf_counter()
    llm = LLM(str(path), context=256, max_seqs=1, max_batch_tokens=CHUNK, backend=backend)
    loaded = time.perf_counter() - began
    facts = llm.opened.facts
    recorded = Recorded(table, llm.config, main_type(path), facts["device"]) if "device" in facts else None
    bandwidth = Bandwidth(1)
    bandwidth.on_host = False
    found: dict[str, Any] = {"backend": facts, "loaded_s": loaded, "rows": []}
    for batch in dict.fromkeys(case.batch for case in cases):
        chosen = [case for case in cases if case.batch == batch]
        for row in suite.run(llm, [Setup(chunk=CHUNK)], chosen, repetitions, bandwidth, recorded=recorded):
            found["rows"].append(row)
            show(path.stem, row)
    found["operations"] = operations(llm)
    found["memory"] = {"predicted": weight_bytes(open_checkpoint(path)), "used": llm.program.nbytes}
    llm.close()
    return found


def show(model: str, row: dict[str, Any]) -> None:
    peer = row.get("against")
    beside = f"{peer['ratio']:6.2f} x {peer['engine']}" if peer else ""
    where = f"{row['test']:>7} @ {row['depth']:<6} x {row['batch']:<4}"
    figures = f"{row['tok_s']:10,.1f} tok/s {row['ms_per_step']:8.3f} ms {row['gb_s']:8.1f} GB/s"
    print(f"{model:12} {where} {figures} {beside}")


def operations(llm: LLM, steps: int = 8) -> dict[str, float]:
    """Microseconds of a decode step at a small depth, by kind of operation, each launched by itself."""
    engine, program = llm.engine, llm.program
    request = engine.add([1, 2, 3], ENDLESS)
    for _ in range(4):
        engine.step()
    program.trace(True)
    for _ in range(steps):
        engine.step()
    program.trace(False)
    times: Counter[str] = Counter()
    for span in program.timings():
        times[re.sub(r"\d+", "N", span.name)] += (span.end - span.begin) / 1e3 / steps
    engine.cancel(request)
    return dict(times.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), metavar="SHAPE-WEIGHTS,..")
    parser.add_argument("--quick", action="store_true", help="two short cases")
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep the models here, and use those that are there")
    parser.add_argument("--against", type=Path, default=RESULTS / "peers-h200.json", metavar="FILE")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--starts", type=int, default=3, help="how often the start of a process is measured")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu-speed.json")
    args = parser.parse_args()
    with TemporaryDirectory(prefix="kvarn-speed-") as temporary:
        folder = args.folder or Path(temporary)
        result: dict[str, Any] = {"command": " ".join(["python", "bench/gpu_speed.py", *sys.argv[1:]]), "models": {}}
        for model in args.models.split(","):
            shape, weights = model.split("-")
            path = folder / f"{model}.gguf"
            if not path.exists():
                random_model.write(path, shape, weights)
            found = measure(path, QUICK if args.quick else CASES, args.repetitions, args.against, args.backend)
            found["first_token_s"] = [first_byte(str(path), args.backend) for _ in range(args.starts)]
            result["models"][model] = found
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print_table(("operation", "us a step"), [(name, f"{us:.1f}") for name, us in found["operations"].items()])
            used, predicted = found["memory"]["used"], found["memory"]["predicted"]
            starts = ", ".join(f"{s:.2f}" for s in found["first_token_s"])
            print(f"weights {used / 1e9:.2f} GB, predicted {predicted / 1e9:.2f}; to the first token {starts} s\n")
            if args.folder is None:
                path.unlink()


if __name__ == "__main__":
    main()
