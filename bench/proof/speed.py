"""Tokens per second, for information: nothing is judged."""

import time

from gpu.support.models import Batch, Loaded, text

from proof.models import write
from proof.report import Report
from proof.site import Site


def run(site: Site, report: Report) -> None:
    path = write(site, "llama", "BF16") if site.model is None or site.interpreted else site.model
    loaded = Loaded(path, site.backend)
    depth, n_new = site.pick((512, 64), (256, 32), (8, 2), (4, 2))
    for batch in site.pick((1, 8, 32), (1, 8), (2,), (2,)):
        with report.check(f"decode, batch {batch}, depth {depth}") as check:
            running = Batch(loaded, depth + n_new + 8, batch, max_chunk=depth)
            for seq in range(batch):
                running.step({seq: text(depth, seq)})
            for _ in range(2):  # warm
                running.step({seq: [1] for seq in range(batch)})
            began = time.monotonic()
            for _ in range(n_new):
                running.step({seq: [1] for seq in range(batch)})
            seconds = time.monotonic() - began
            check.case(seconds > 0, "no time passed")
            check.number("tokens/s", round(batch * n_new / seconds, 1))
            check.number("ms a step", round(1e3 * seconds / n_new, 3))
    for n in site.pick((512, 2048), (512,), (16,), (8,)):
        with report.check(f"prefill, {n} tokens") as check:
            times = []
            for seq in range(4):
                running = Batch(loaded, n + 1, 1, max_chunk=n)
                began = time.monotonic()
                running.step({0: text(n, seq)})
                times.append(time.monotonic() - began)
            check.case(min(times) > 0, "no time passed")
            check.number("tokens/s", round(n / min(times), 1))
