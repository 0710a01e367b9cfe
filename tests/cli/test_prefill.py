"""The line that shows how much of a prompt is computed."""

import io
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.serving import tiny_model

from kvarn import LLM, SamplingParams
from kvarn.cli import prefill
from kvarn.cli.prefill import PrefillProgress
from kvarn.dialect import Content, joined


class Terminal(io.StringIO):
    """Standard error on a terminal. `seen` is set when the awaited text is written."""

    def __init__(self, awaited: str = "") -> None:
        super().__init__()
        self._awaited = awaited
        self.seen = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._awaited in text:
            self.seen.set()
        return super().write(text)


def job_with(computed: int, prompt: int, n_output: int = 0) -> SimpleNamespace:
    sample = SimpleNamespace(computed=computed, n_output=n_output)
    return SimpleNamespace(request=SimpleNamespace(samples=[sample], prompt=[0] * prompt))


def test_the_share_is_shown_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal("reading the prompt  38 %")
    monkeypatch.setattr(sys, "stderr", screen)
    job = job_with(38, 100)
    with PrefillProgress(job, delay=0):  # type: ignore[arg-type]
        assert screen.seen.wait(60)
    assert screen.getvalue().endswith("reading the prompt  38 %\r\x1b[2K")


def test_the_line_goes_with_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal("reading the prompt")
    monkeypatch.setattr(sys, "stderr", screen)
    job = job_with(38, 100)
    with PrefillProgress(job, delay=0):  # type: ignore[arg-type]
        assert screen.seen.wait(60)
        thread = next(each for each in threading.enumerate() if each.name == "kvarn-prefill-progress")
        job.request.samples[0].n_output = 1
        thread.join(60)
        assert screen.getvalue().endswith("\r\x1b[2K"), "removed before the block ends"


def test_without_a_terminal_there_is_no_thread(capsys: pytest.CaptureFixture) -> None:
    with PrefillProgress(job_with(0, 100), delay=0):  # type: ignore[arg-type]
        assert not any(each.name == "kvarn-prefill-progress" for each in threading.enumerate())
    assert capsys.readouterr().err == ""


def test_a_stream_with_progress_has_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    params = SamplingParams(max_tokens=8, temperature=0)
    with LLM(tiny_model(tmp_path), context=256, max_batch_tokens=16) as llm:
        expected = llm.generate("abcd" * 40, params)[0].text
        parts = list(prefill.stream(llm, llm.start("abcd" * 40, params)))
        assert joined(parts) == [Content(expected)]
        left = prefill.stream(llm, llm.start("abcd" * 40, params))
        next(left)
        left.close()
        assert not llm.runner.busy, "leaving the loop cancels the request"
