"""Measures the whole engine on a GPU with random weights, beside recorded speeds of other engines.

    python bench/gpu_speed.py [--models 1.1B-BF16,8B-Q4_K_M] [--cells bf16,int8,int4] [--deep] [--quick] [--folder DIR]

For each model: decode at three depths, in batches of 32 and 128, a prompt of 4,096 tokens, decode at two depths
with other cells, the operations of a decode step and the host's work in it, the memory that was predicted and
used, and the time from the start of a process to its first token. Writes one JSON file, after every model.
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
from kvarn.bench.subject import Setup
from kvarn.cli.table import print_table
from kvarn.loading.checkpoint import open_checkpoint

RESULTS = Path(__file__).resolve().parent / "results"
MODELS = ("1.1B-BF16", "8B-BF16", "1.1B-Q4_K_M", "8B-Q4_K_M")
CASES = [
    *(Case("tg", 64, depth) for depth in (128, 4096, 32_000)),
    *(Case("tg", 64, 1024, batch) for batch in (32, 128)),
    Case("pp", 4096),
]
DEEP = [Case("tg", 64, depth) for depth in (4096, 32_000)]  # of cells other than bf16
QUICK = [Case("tg", 16, 128), Case("pp", 512)]
CHUNK = 4096  # most tokens of a step
REPLAYS = 40  # of a graph, for its time


def measure(path: Path, cases: dict[str, list[Case]], repetitions: int, table: Path, backend: str) -> dict[str, Any]:
    """Cases by the type of cells."""
    began = time.perf_counter()
    llm = LLM(str(path), context=256, max_seqs=1, max_batch_tokens=CHUNK, backend=backend)
    loaded = time.perf_counter() - began
    facts = llm.opened.facts
    recorded = Recorded(table, llm.config, main_type(path), facts["device"]) if "device" in facts else None
    bandwidth = Bandwidth(1)
    bandwidth.on_host = False
    found: dict[str, Any] = {"backend": facts, "loaded_s": loaded, "rows": []}
    for cells, batch in dict.fromkeys((name, case.batch) for name in cases for case in cases[name]):
        chosen, beside = [case for case in cases[cells] if case.batch == batch], recorded if cells == "bf16" else None
        for row in suite.run(llm, [setup_of(cells)], chosen, repetitions, bandwidth, recorded=beside):
            found["rows"].append(row)
            show(f"{path.stem} {cells}", row)
    found["steps"] = {}
    for cells, case in ((name, case) for name in cases for case in cases[name] if case.kind == "tg"):
        decoding = Decoding(llm, case, cells)
        name = f"{case.batch} at {case.depth}{'' if cells == 'bf16' else f', {cells}'}"
        found["steps"][name] = decoding.host() | {"kernels_us": decoding.kernels()}
        decoding.close()
        del decoding  # its cache
    found["memory"] = {"predicted": weight_bytes(open_checkpoint(path)), "used": llm.program.nbytes}
    llm.close()
    return found


def setup_of(cells: str) -> Setup:
    return Setup(chunk=CHUNK, cache_type=cells)


def show(model: str, row: dict[str, Any]) -> None:
    peer = row.get("against")
    beside = f"{peer['ratio']:6.2f} x {peer['engine']}" if peer else ""
    where = f"{row['test']:>7} @ {row['depth']:<6} x {row['batch']:<4}"
    figures = f"{row['tok_s']:10,.1f} tok/s {row['ms_per_step']:8.3f} ms {row['gb_s']:8.1f} GB/s"
    print(f"{model:17} {where} {figures} {beside}")


def show_steps(steps: dict[str, Any]) -> None:
    names = list(dict.fromkeys(name for step in steps.values() for name in step["kernels_us"]))
    rows = [("step", *(f"{step['step_us']:.0f}" for step in steps.values()))]
    rows += [("the host works", *(f"{step['host_us']:.0f}" for step in steps.values()))]
    rows += [(name, *(f"{step['kernels_us'].get(name, 0):.0f}" for step in steps.values())) for name in names]
    print_table(("us of a step", *steps), rows)


class Decoding:
    """Decode steps of a case, and the kernels in their graph."""

    def __init__(self, llm: LLM, case: Case, cells: str) -> None:
        self._driver, self._graphs = llm.backend._driver, llm.program.graphs
        self._names = {function: kernel.name for kernel, function in self._driver._functions.items()}
        self._seen: tuple[Any, Any] | None = None  # memory and frame of the last step
        self._subject = suite.subject(llm, setup_of(cells), [case])
        self._subject.prepare(case)
        self._case = case

    def host(self) -> dict[str, float]:
        """Microseconds of a step, and how long the host works in it; the rest of the time it waits for the device."""
        waited, wait = 0.0, self._driver.wait

        def timed(event: Any) -> None:
            nonlocal waited
            began = time.perf_counter()
            wait(event)
            waited += time.perf_counter() - began

        self._driver.wait = timed
        reading = self._subject.measure(self._case)
        del self._driver.wait
        return {
            "step_us": reading.seconds / reading.steps * 1e6,
            "host_us": (reading.seconds - waited) / reading.steps * 1e6,
        }

    def kernels(self) -> dict[str, float]:
        """Microseconds of the graph, which has no logits, and by how much it is shorter without each kernel."""
        run = self._graphs.run

        def noted(memory: Any, frame: Any, sampled: Any) -> None:
            self._seen = memory, frame
            run(memory, frame, sampled)

        self._graphs.run = noted
        self._subject.measure(self._case)
        del self._graphs.run
        self._driver.synchronize()
        whole, names = self._graph_us(None)
        found = {name: whole - self._graph_us(name)[0] for name in names}
        return {"whole": whole} | dict(sorted(found.items(), key=lambda item: -item[1]))

    def _graph_us(self, without: str | None, replays: int = REPLAYS) -> tuple[float, list[str]]:
        """Also the names of its kernels."""
        assert self._seen is not None
        memory, frame = self._seen
        names, name, launch = Counter[str](), "", self._driver.launch

        def noted(function: Any, grid: Any, args: Any) -> None:
            kernel = f"{name} {self._names[function]}"
            names[kernel] += 1
            if kernel != without:
                launch(function, grid, args)

        def launches() -> None:
            nonlocal name
            for operation in self._graphs._operations:
                name = re.sub(r"blk\.\d+\.|[ .]\d+|\.weight", "", operation.name)
                operation.run(memory, frame.padded())

        self._driver.launch = noted
        graph = self._driver.capture(launches)
        del self._driver.launch
        start, end = self._driver.event(), self._driver.event()
        self._driver.replay(graph)
        self._driver.record(start)
        for _ in range(replays):
            self._driver.replay(graph)
        self._driver.record(end)
        return float(self._driver.elapsed(start, end)) / replays * 1e3, list(names)

    def close(self) -> None:
        self._subject.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), metavar="SHAPE-WEIGHTS,..")
    parser.add_argument("--cells", default="bf16", metavar="TYPE,..", help="types of cells, as --cache-type takes them")
    parser.add_argument("--deep", action="store_true", help="only decode at depths of 4,096 and 32,000")
    parser.add_argument("--quick", action="store_true", help="two short cases")
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep the models here, and use those that are there")
    parser.add_argument("--against", type=Path, default=RESULTS / "peers-h200.json", metavar="FILE")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--starts", type=int, default=3, help="how often the start of a process is measured")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu-speed.json")
    args = parser.parse_args()
    deep = QUICK if args.quick else DEEP
    plain = deep if args.quick or args.deep else CASES
    cases = {cells: plain if cells == "bf16" else deep for cells in args.cells.split(",")}
    with TemporaryDirectory(prefix="kvarn-speed-") as temporary:
        folder = args.folder or Path(temporary)
        result: dict[str, Any] = {"command": " ".join(["python", "bench/gpu_speed.py", *sys.argv[1:]]), "models": {}}
        for model in args.models.split(","):
            shape, weights = model.split("-")
            path = folder / f"{model}.gguf"
            if not path.exists():
                random_model.write(path, shape, weights)
            found = measure(path, cases, args.repetitions, args.against, args.backend)
            found["first_token_s"] = [first_byte(str(path), args.backend) for _ in range(args.starts)]
            result["models"][model] = found
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            show_steps(found["steps"])
            used, predicted = found["memory"]["used"], found["memory"]["predicted"]
            starts = ", ".join(f"{s:.2f}" for s in found["first_token_s"])
            print(f"weights {used / 1e9:.2f} GB, predicted {predicted / 1e9:.2f}; to the first token {starts} s\n")
            if args.folder is None:
                path.unlink()


if __name__ == "__main__":
    main()
