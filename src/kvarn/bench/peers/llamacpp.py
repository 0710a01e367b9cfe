"""llama.cpp as the subject of a benchmark, through llama-cpp-python in another Python interpreter.

Each case is first tried with every KV cache type, with and without flash attention. The fastest setting
is then measured.
"""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvarn.bench.case import Case, Reading
from kvarn.errors import KvarnError

WORKER = Path(__file__).with_name("llamacpp_worker.py")
SETTINGS = (
    {"type": "f16", "flash": True},
    {"type": "f16", "flash": False},
    {"type": "bf16", "flash": True},
    {"type": "bf16", "flash": False},
    {"type": "q8_0", "flash": True},  # llama.cpp supports quantized V only with flash attention
)
TRIAL = 16  # most tokens to generate in a trial


class LlamaCpp:
    def __init__(
        self, python: str, model: Path, threads: int, chunk: int, cases: Sequence[Case], worker: Path = WORKER
    ) -> None:
        self.contexts = {case.batch: max(c.context for c in cases if c.batch == case.batch) for case in cases}
        self.tried: dict[Case, dict[str, float]] = {}
        self.setting: dict[str, Any] = {}
        self.last: Case | None = None
        self.python = python
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                [python, "-I", str(worker)], stdin=pipe, stdout=pipe, stderr=self.stderr, text=True
            )
        except OSError as error:
            self.stderr.close()
            raise KvarnError(f"{python}: {error.strerror}") from None
        try:
            self.engine: str = self.ask(model=str(model), threads=threads, chunk=chunk)["engine"]
        except KvarnError:
            self.close()
            raise

    def prepare(self, case: Case) -> None:
        """Find the best setting for the case, once, and apply it."""
        self.last = case
        if case not in self.tried:
            self.tried[case] = {name_of(setting): self.trial(case, setting) for setting in SETTINGS}
        tried = self.tried[case]
        self.setting = max(SETTINGS, key=lambda setting: tried[name_of(setting)])
        self.place(case, self.setting)

    def measure(self, case: Case) -> Reading:
        answer = self.ask(op="measure", kind=case.kind, n=case.n)
        return Reading(answer["tokens"], answer["seconds"])

    def trial(self, case: Case, setting: dict[str, Any]) -> float:
        self.place(case, setting)
        n = case.n if case.kind == "pp" else min(case.n, TRIAL)
        answer = self.ask(op="measure", kind=case.kind, n=n)
        return float(answer["tokens"] / answer["seconds"])

    def place(self, case: Case, setting: dict[str, Any]) -> None:
        context = self.contexts[case.batch]
        self.ask(op="prepare", setting=setting, context=context, depth=case.depth, batch=case.batch)

    def describe(self) -> dict[str, object]:
        tried = self.tried.get(self.last, {}) if self.last else {}
        return {"engine": self.engine, "setting": name_of(self.setting), "tried": tried}

    def ask(self, **question: object) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        try:
            print(json.dumps(question), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise KvarnError(f"llama-cpp-python ended: {self.last_error()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise KvarnError(f"llama-cpp-python: {answer['error']}")
        return answer

    def last_error(self) -> str:
        self.process.wait()
        self.stderr.seek(0)
        lines = [line.strip() for line in self.stderr if line.strip()]
        if lines and "No module named 'llama_cpp'" in lines[-1]:
            return f"{self.python} does not have it; name one that does with --against-python or KVARN_PEER_PYTHON"
        return f"{lines[-1] if lines else 'no message'} (exit status {self.process.returncode})"

    def close(self) -> None:
        self.process.terminate()
        self.process.communicate()
        self.stderr.close()


def name_of(setting: dict[str, Any]) -> str:
    return f"{setting['type']} {'flash' if setting['flash'] else 'no flash'}"
