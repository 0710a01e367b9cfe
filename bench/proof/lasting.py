"""Cells that leave the device and come back: snapshots, host memory and a folder, with the bits that were computed."""

import shutil
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import random_model
from gpu.support.models import text

from kvarn import LLM, SamplingParams
from kvarn.cache.codec import CODECS, codecs_of
from kvarn.cache.plan import CacheConfig, plan
from kvarn.errors import KvarnError
from kvarn.jobs.job import Output
from kvarn.lasting.cells import Cells
from kvarn.lasting.snapshot import SnapshotFile
from kvarn.loading.checkpoint import open_checkpoint
from proof.models import write
from proof.report import Check, Report
from proof.site import Site

SLOW = 1e5  # seconds for a step: reading is then always worth it
STRATEGIES: list[dict[str, Any]] = [
    dict(cache="contiguous"),
    dict(cache="paged", block_size=16, cache_layout="token-major"),  # larger blocks may need cells outside a window
    dict(cache="head-major"),
    dict(cache="sliding", block_size=16),
]


def run(site: Site, report: Report) -> None:
    models = [("llama", "BF16"), ("gemma3", "BF16"), ("qwen2", "Q6_K"), ("phi3", "F16")]
    codecs = site.pick(tuple(CODECS), tuple(CODECS), ("bf16",))
    for architecture, type_name in site.pick(models, models[:2], models[:1]):
        path = write(site, architecture, type_name)
        for codec in filter(partial(_has, site, path), codecs):
            of = f"{architecture} {type_name}, cells {codec}"
            with report.check(f"snapshots, {of}") as check:
                _snapshots(site, check, path, codec)
            with report.check(f"tiers, {of}") as check:
                _tiers(site, check, path, codec)
    if not site.interpreted:
        with report.check("first token from disk") as check:
            _first_token(site, check)


def _has(site: Site, path: Path, codec: str) -> bool:
    """Whether the device has these cells for the model. A snapshot of cells with a tail lacks its last tokens."""
    specs = open_checkpoint(path).config.layer_specs
    try:
        site.backend.memory(plan(CacheConfig(specs, 64, "paged", codec), site.backend.default_layout))
    except KvarnError:
        return False
    return not codecs_of(codec).tail


def _open(site: Site, path: Path, codec: str, n_tokens: int, **settings: Any) -> LLM:
    """With room for two texts of this length."""
    usual = dict(
        cache="paged", block_size=16, context=n_tokens + 32, max_seqs=1, max_batch_tokens=site.pick(64, 64, 32)
    )
    return LLM(path, backend=site.backend, cache_type=codec, **{**usual, "cache_bytes": 64 << 20, **settings})


def _snapshots(site: Site, check: Check, path: Path, codec: str) -> None:
    """Cells that were computed in one cache, and restored in another one from a file, are read back and compared."""
    n = site.pick(400, 250, 37, 20)
    prompt, params = text(n, 71), SamplingParams(max_tokens=site.pick(16, 8, 3, 2), logprobs=2, ignore_eos=True)
    longer = prompt + text(5, 72)
    made, folder = f"{path.stem}-{codec}", Path(site.folder.name)
    with _open(site, path, codec, n) as llm:
        cold = _answer(llm, longer, params)
        llm.save_snapshot(folder / f"{made}.kvs", prompt)
        expected = _cells(folder / f"{made}.kvs", llm)
    for number, settings in enumerate(site.pick(STRATEGIES, STRATEGIES, STRATEGIES[:2], STRATEGIES[:1])):
        with _open(site, path, codec, n, **settings) as llm:
            llm.save_snapshot(folder / f"{made}-c{number}.kvs", prompt)
            ours = _cells(folder / f"{made}-c{number}.kvs", llm)
            check.case(_same(ours, expected), f"{settings}: cells that were computed")
        with _open(site, path, codec, n, **settings, snapshot=folder / f"{made}.kvs") as llm:
            llm.save_snapshot(folder / f"{made}-r{number}.kvs", prompt)
            check.case(_same(_cells(folder / f"{made}-r{number}.kvs", llm), expected), f"{settings}: restored cells")
        with _open(site, path, codec, n, **settings, snapshot=folder / f"{made}.kvs") as llm:
            found = _answer(llm, longer, params)
            check.case(found[0] == cold[0], f"{settings}: the answer after a restore")
            check.case(found[1].cached_tokens == n, f"{settings}: {found[1].cached_tokens} of {n} tokens reused")
            some = site.pick(16, 8, 2, 1)
            verified = llm.snapshots.verify(folder / f"{made}.kvs", some, 1, lambda *_: None)
            check.case(verified >= some, f"{settings}: {verified} tokens verified")
    check.number("bytes", (folder / f"{made}.kvs").stat().st_size)


def _cells(path: Path, llm: LLM) -> Cells:
    with SnapshotFile(path) as file:
        return llm.snapshots.read(file).cells


def _same(ours: Cells, theirs: Cells) -> bool:
    """Where both have cells: one with a window has fewer."""
    if ours.rows.keys() != theirs.rows.keys() or not ours.rows:
        return False
    for name, rows in ours.rows.items():
        n = min(len(rows), len(theirs.rows[name]))
        if not n or not np.array_equal(rows[-n:], theirs.rows[name][-n:]):
            return False
    return True


def _answer(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[list[Any], Output]:
    (output,) = llm.generate([prompt], params)
    first = output.completions[0]
    return [first.tokens, [(each.logprob, each.top) for each in first.logprobs]], output


def _tiers(site: Site, check: Check, path: Path, codec: str) -> None:
    """Prompts that come back from host memory, and after a restart from a folder, have the answers that they have
    cold."""
    n, n_texts = site.pick((300, 6), (200, 4), (40, 4))
    params = SamplingParams(max_tokens=site.pick(8, 6, 2, 2), logprobs=2, ignore_eos=True)
    texts = [text(n, 80 + i) for i in range(n_texts)]
    folder = Path(site.folder.name) / f"{path.stem}-{codec}"
    with _open(site, path, codec, n) as llm:
        cold = [_answer(llm, each, params)[0] for each in texts]
        per_text = sum(len(llm.memory.read_block(g, 0)) for g in range(len(llm.cache.plan.groups))) * (n // 16 + 3)
    tight = dict(cache_bytes=int(1.5 * per_text), disk_cache=folder)
    with _open(site, path, codec, n, **tight, host_cache=1 << 28) as llm:
        for each, expected in zip([*texts, *texts], [*cold, *cold], strict=True):
            check.case(_slowly(llm, each, params)[0] == expected, "an answer with tiers")
        reads = llm.engine.tiers.counts()["host"].reads
        check.case(reads > 0, "nothing came back from host memory")
        check.number("blocks from host memory", reads)
    with _open(site, path, codec, n, **tight) as llm:
        reused = 0
        for each, expected in zip(texts, cold, strict=True):
            found, output = _slowly(llm, each, params)
            check.case(found == expected, "an answer after a restart")
            reused += output.cached_tokens
        check.case(reused == n_texts * ((n - 1) // 16 * 16), f"{reused} tokens came back after a restart")
        count = llm.engine.tiers.counts()["disk"]
        check.case(count.reads > 0 and not count.drops, f"{count.reads} blocks from disk, {count.drops} dropped")
        check.number("blocks from disk", count.reads)


def _slowly(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[list[Any], Output]:
    llm.engine.tiers.computed(1, SLOW)
    return _answer(llm, prompt, params)


def _first_token(site: Site, check: Check) -> None:
    """Of a history of 3,000 tokens after a restart, in a model of 1.1B parameters: for information."""
    path, folder = Path(site.folder.name) / "1.1B.gguf", Path(site.folder.name) / "history"
    random_model.write(path, "1.1B", "BF16")
    history, question = text(3000, 90), text(30, 91)
    params = SamplingParams(max_tokens=1, logprobs=2, ignore_eos=True)
    settings = dict(cache_bytes=512 << 20, max_batch_tokens=512, block_size=32)
    with _open(site, path, "bf16", 3072, **settings, disk_cache=folder) as llm:
        _answer(llm, history, params)
    times: dict[str, list[float]] = {"computed": [], "disk": []}
    answers = []
    for i in range(3):
        for way in times:
            copy = folder.with_name(f"history-{i}")  # a run stores the question, too
            tier = dict(disk_cache=shutil.copytree(folder, copy)) if way == "disk" else {}
            with _open(site, path, "bf16", 3072, **settings, **tier) as llm:
                _answer(llm, text(600, 92 + i), params)  # the first requests also measure kernels
                if way == "disk":
                    llm.engine.tiers.computed(1, SLOW)
                began = time.perf_counter()
                found, output = _answer(llm, history + question, params)
                times[way].append(time.perf_counter() - began)
                answers.append(found)
                # From files only as long as reading is as fast as computing was said to be.
                check.case((output.cached_tokens > 0) == (way == "disk"), f"{way}: {output.cached_tokens} reused")
    check.case(all(each == answers[0] for each in answers), "the answers differ")
    for way, seconds in times.items():
        check.number(f"{way} ms", round(1e3 * statistics.median(seconds), 1))
    check.number("MB", round(sum(file.stat().st_size for file in folder.rglob("*.kvb")) / 1e6, 1))
