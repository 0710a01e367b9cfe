"""The summary of a load run: rates, times, and goodput (the requests that met the goal)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvarn.bench.load.client import Outcome
from kvarn.errors import KvarnError

MEASURES = ("ttft", "tpot", "e2e")


def parse_goal(texts: Sequence[str]) -> dict[str, float]:
    """["ttft:500", "tpot:50"] -> milliseconds by measure."""
    goal = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            goal[name] = float(value)
        except ValueError:
            goal[name] = -1.0
        if name not in MEASURES or not goal[name] > 0:
            raise KvarnError(
                f"--goodput {text}: give a measure and milliseconds, as in ttft:500 ({', '.join(MEASURES)})"
            )
    return goal


def summarize(outcomes: Sequence[Outcome], goal: Mapping[str, float]) -> dict[str, Any]:
    good = [outcome for outcome in outcomes if outcome.error is None]
    seconds = max((o.end for o in outcomes), default=0.0) - min((o.start for o in outcomes), default=0.0)
    times = {
        "ttft": [1000 * o.ttft for o in good],
        "tpot": [1000 * o.tpot for o in good if o.output_tokens > 1],
        "itl": [1000 * gap for o in good for gap in o.gaps],
        "e2e": [1000 * (o.end - o.start) for o in good],
    }
    output = sum(o.output_tokens for o in good)
    prompt = sum(o.prompt_tokens for o in good)
    report: dict[str, Any] = {
        "requests": len(outcomes),
        "completed": len(good),
        "errors": dict(Counter(o.error for o in outcomes if o.error is not None)),
        "seconds": seconds,
        "prompt_tokens": prompt,
        "cached_tokens": sum(o.cached_tokens for o in good),
        "output_tokens": output,
        "requests_per_second": _rate(len(good), seconds),
        "output_tokens_per_second": _rate(output, seconds),
        "total_tokens_per_second": _rate(prompt + output, seconds),
        **{f"{name}_ms": _spread(values) for name, values in times.items()},
    }
    if goal:
        met = sum(_meets(outcome, goal) for outcome in good)
        report["goodput"] = {
            "goal_ms": dict(goal),
            "requests_per_second": _rate(met, seconds),
            "share": met / max(len(outcomes), 1),
        }
    return report


def _meets(outcome: Outcome, goal: Mapping[str, float]) -> bool:
    reached = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2e": outcome.end - outcome.start}
    return all(1000 * reached[name] <= limit for name, limit in goal.items())


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {
        "mean": float(np.mean(values)),
        "median": float(np.median(values)),
        "p99": float(np.percentile(values, 99)),
        "max": float(np.max(values)),
    }


def _rate(n: int, seconds: float) -> float:
    return n / seconds if seconds > 0 else 0.0
