"""Checks and their results: a line per check on the terminal, and one JSON file that is written after each."""

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_FAILURES = 8  # that the file has in words; all are counted
NAME = 34  # columns


@dataclass
class Check:
    section: str
    name: str
    cases: int = 0
    n_failures: int = 0
    failures: list[str] = field(default_factory=list)  # the first ones
    numbers: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def case(self, holds: bool, what: str) -> None:
        """One more case. `what` is for the reader of a failure."""
        self.cases += 1
        if not holds:
            self.fail(what)

    def within(self, name: str, value: float, limit: float, what: str) -> None:
        """A case that holds if the value is at most the limit. The largest value is kept."""
        self.numbers[name] = max(float(value), self.numbers.get(name, 0.0))
        self.numbers[f"{name} limit"] = max(limit, self.numbers.get(f"{name} limit", 0.0))
        self.case(value <= limit, f"{what}: {name} {value:.3g} > {limit:.3g}")

    def number(self, name: str, value: float | str) -> None:
        self.numbers[name] = round(value, 6) if isinstance(value, float) else value

    def fail(self, what: str) -> None:
        self.n_failures += 1
        if len(self.failures) < MOST_FAILURES:
            self.failures.append(what)

    def line(self) -> str:
        verdict = f"{self.n_failures} failed" if self.n_failures else "ok"
        shown = [f"{k} {_short(v)}" for k, v in self.numbers.items() if not k.endswith(" limit")]
        head = f"{self.section:<12}{self.name:<{NAME}}{self.cases:>6} cases {verdict:>10} {self.seconds:>7.1f} s   "
        return head + ", ".join(shown)


class Report:
    def __init__(self, path: Path | None, facts: dict[str, Any]) -> None:
        self.path, self.facts = path, facts
        self.checks: list[Check] = []
        self.not_done: dict[str, str] = {}  # section: why
        self.section = ""
        self._began = time.monotonic()

    @contextmanager
    def check(self, name: str) -> Iterator[Check]:
        """An error of the code under test is a failure of this check, and the next one goes on."""
        check, began = Check(self.section, name), time.monotonic()
        try:
            yield check
        except Exception as error:  # noqa: BLE001 (the others should run)
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            check.fail(" ".join(f"{type(error).__name__} in {place}: {error}".split())[:300])
        check.seconds = round(time.monotonic() - began, 3)
        if not check.cases and not check.n_failures:
            check.fail("it had no case")
        self.checks.append(check)
        print(check.line(), flush=True)
        for failure in check.failures:
            print(f"{'':<12}FAILED: {failure}", flush=True)
        self.write()

    def skip(self, why: str) -> None:
        self.not_done[self.section] = why
        print(f"{self.section:<12}not done: {why}", flush=True)
        self.write()

    @property
    def failures(self) -> int:
        return sum(check.n_failures for check in self.checks)

    def write(self) -> None:
        if self.path is None:
            return
        whole = self.facts | {
            "cases": sum(check.cases for check in self.checks),
            "failures": self.failures,
            "seconds": round(time.monotonic() - self._began, 1),
            "not_done": self.not_done,
            "checks": [vars(check) for check in self.checks],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
