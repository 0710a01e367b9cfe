"""SmolLM2 on the device: llama.cpp's greedy texts, logits against the reference, perplexity on three backends.

Its quantized matrices are widened to f16 on the device, and the reference computes in f32: logits
differ by what the device rounds away. tests/golden has llama.cpp's answers on the widened file.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from gpu.support.models import Floats, Loaded

from kvarn.backends import open_backend
from kvarn.cache.strategy import STRATEGIES
from kvarn.engine.scoring import perplexity
from kvarn.text.tokenizer import Tokenizer
from proof.report import Check, Report
from proof.site import Site

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden" / "smollm2-f32.json"
LEAD = 0.1  # nats: where llama.cpp prefers its token by more, ours must be the same
LOGITS = 2e-2  # largest difference of logits, relative to the largest logit
PERPLEXITY = 1e-2  # relative difference; the cpu backend rounds the inputs of quantized matrices
WINDOW = 512
CHARACTERS = 400_000  # of the text that is read


def run(site: Site, report: Report) -> None:
    if site.model is None:
        report.skip("no --model was given")
        return
    known = json.loads(GOLDEN.read_text())
    loaded = Loaded(site.model, site.backend)
    with report.check("greedy texts") as check:
        for answer in known["greedy"][: site.pick(5, 5, 1)]:
            _follows(check, loaded, answer, site.pick(32, 32, 1))
    n = site.pick(512, 256, 6)
    tokens = known["tokens"][:n]
    ours = loaded.logits(tokens, n, codec="bf16")
    with report.check("most likely tokens of a text") as check:
        sure = [i for i, margin in enumerate(known["margins"][: n - 1]) if margin > LEAD]
        for i in sure:
            _most_likely(check, ours[i], known["top1"][i], known["margins"][i])
        same = ours[:-1].argmax(1) == np.array(known["top1"])[: n - 1]
        check.number("agreement, small margins too", float(same.mean()))
    with report.check("logits against the reference") as check:
        few = site.pick(256, 64, 6)
        reference = Loaded(site.model, open_backend("reference", None))
        began = time.monotonic()
        theirs = reference.logits(tokens[:few], few, codec="f32")
        check.number("reference s", round(time.monotonic() - began, 1))
        difference = np.abs(ours[:few] - theirs)
        check.number("largest difference", float(difference.max()))
        check.number("mean difference", float(difference.mean()))
        check.within("relative", float(difference.max() / np.abs(theirs).max()), LOGITS, "logits")
    with report.check("every strategy, the same bits") as check:
        for strategy in site.pick(tuple(STRATEGIES), ("ring", "repeated"), ("ring",)):
            settings: dict[str, Any] = dict(strategy=strategy, codec="bf16", pinned=0)
            found = loaded.logits(tokens, site.pick(64, 64, 4), **settings)
            check.case(bool((found.view(np.uint32) == ours.view(np.uint32)).all()), strategy)
    with report.check("perplexity") as check:
        _perplexities(site, check, loaded, reference, known["tokens"])


def _follows(check: Check, loaded: Loaded, answer: dict[str, Any], most: int) -> None:
    """Teacher-forced along llama.cpp's text, until its margin first falls below the lead."""
    prompt, tokens, margins = answer["prompt_tokens"], answer["tokens"][:most], answer["margins"]
    rows = loaded.logits(prompt + tokens, len(prompt + tokens), len(prompt) - 1, codec="bf16")
    for token, margin, row in zip(tokens, margins, rows, strict=False):
        if margin < LEAD:
            return
        _most_likely(check, row, token, margin)


def _most_likely(check: Check, row: Floats, token: int, margin: float) -> None:
    found = int(row.argmax())
    check.case(found == token, f"{found}, not {token}: {margin:.3f} there, {row[token] - row[found]:.3f} here")


def _perplexities(site: Site, check: Check, loaded: Loaded, reference: Loaded, golden: list[int]) -> None:
    """On the device and on the cpu backend; on the reference, which is slow, over the first window."""
    tokens, window, windows = golden, site.pick(WINDOW, 128, 6), 1
    if site.text is not None and not site.interpreted:
        tokenizer = Tokenizer.from_gguf(loaded.checkpoint.metadata)
        tokens, windows = tokenizer.encode(site.text.read_text(encoding="utf-8")[:CHARACTERS]), site.pick(8, 2, 1)
    models = {"cuda": loaded, "cpu": Loaded(site.model or Path(), open_backend("cpu", None)), "reference": reference}
    found: dict[str, float] = {}
    for name, model in models.items():
        count = site.pick(min(windows, 2), 1, 1) if name == "reference" else windows
        began = time.monotonic()
        result = perplexity(model.program, *model.cache(window, codec="bf16"), tokens, window, count, None, window)
        found[name] = result.ppl
        check.number(name, result.ppl)
        check.number(f"{name} s", round(time.monotonic() - began, 1))
        if name == "reference" and count != windows:
            memory, book = loaded.cache(window, codec="bf16")
            found["cuda"] = perplexity(loaded.program, memory, book, tokens, window, count, None, window).ppl
            check.number("cuda, same windows", found["cuda"])
        if name != "cuda":
            off = abs(math.log(found["cuda"] / found[name]))
            limit = site.pick(PERPLEXITY, PERPLEXITY, 1.0)  # a few tokens say little
            check.within("relative", off, limit, f"cuda {found['cuda']:.4f}, {name} {found[name]:.4f}")
