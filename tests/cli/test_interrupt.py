"""Ctrl-C: the shell's prompt on a new line, statistics of what was computed, status 130. The second ends at once."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.serving import MAIN, tiny_model
from support.terminal import SECONDS

from kvarn.cli import main, prefill
from kvarn.cli.interrupt import FirstInterruptEnds, SecondInterruptEnds, end_line


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), context=65536)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the third piece of the answer."""
    whole = prefill.stream

    def stream(*args: object) -> Iterator[str]:
        for n, piece in enumerate(whole(*args)):  # type: ignore[arg-type]
            yield piece
            if n == 2:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(prefill, "stream", stream)


@pytest.mark.usefixtures("interrupted")
def test_run_prints_what_it_has(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["run", str(tiny), "abc", "-n", "50", "--ignore-eos", "--echo"]) == 130
    said = capsys.readouterr()
    assert said.out.startswith("abc")
    assert said.out.endswith("\n")
    assert re.fullmatch(r"\[\d+ \+ [1-9]\d* tokens, 0 reused.*; stopped\]\n", said.err)


@pytest.mark.usefixtures("interrupted")
def test_run_json_and_the_trace(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    line = ["run", str(tiny), "abc", "-n", "50", "--ignore-eos", "--json", "--trace", str(tmp_path / "trace")]
    assert main(line) == 130
    report = json.loads(capsys.readouterr().out)
    assert report["finish_reason"] == "cancelled"
    assert 3 <= len(report["tokens"]) < 50
    assert len(json.loads((tmp_path / "trace").read_text())["traceEvents"]) > 2


ON_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); " + MAIN


def on_terminal(line: list[str], awaited: bytes) -> tuple[bytes, int]:
    """Run kvarn on a terminal and press Ctrl-C when it shows `awaited`. What it shows from there, and its status."""
    screen, inside = pty.openpty()
    command = [sys.executable, "-c", ON_TERMINAL, *line]
    streams = {"stdin": inside, "stdout": inside, "stderr": inside}
    with subprocess.Popen(command, **streams, start_new_session=True) as process:  # type: ignore[call-overload]
        os.close(inside)
        shown, seen = b"", False
        try:
            while select.select([screen], [], [], SECONDS)[0] and (piece := os.read(screen, 65536)):
                shown += piece
                if not seen and awaited in shown:
                    seen, shown = True, b""
                    os.write(screen, b"\x03")
        except OSError:  # the process has ended
            pass
        finally:
            os.close(screen)  # hangs up
            try:
                status = process.wait(SECONDS)
            finally:
                process.kill()
        assert seen, f"the screen does not show {awaited!r}: {shown!r}"
        return shown, status


def test_run_on_a_terminal(tiny: Path) -> None:
    line = ["run", str(tiny), "abcdef", "-c", "0", "-n", "-1", "--ignore-eos", "--echo"]
    shown, status = on_terminal(line, b"abcdef")
    assert status == 130
    last, end = shown.split(b"\r\n")[-2:]
    assert re.fullmatch(rb"\[\d+ \+ \d+ tokens, 0 reused.*; stopped.*\]", last)
    assert end == b""


def test_serve_on_a_terminal(tiny: Path) -> None:
    shown, status = on_terminal(["serve", str(tiny), "-c", "64", "--port", "0"], b"/v1\r\n")
    assert (shown[:2], shown[-2:], status) == (b"^C", b"\r\n", 0)


TWICE = """
import signal, threading
from kvarn.cli.interrupt import SecondInterruptEnds
signal.signal(signal.SIGINT, lambda *_: print("once", flush=True))
with SecondInterruptEnds():
    print("ready", flush=True)
    threading.Event().wait()
"""


def test_the_second_interrupt_ends_a_process_that_does_not_react() -> None:
    with subprocess.Popen([sys.executable, "-c", TWICE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            for expected in ("ready\n", "once\n"):
                assert process.stdout.readline() == expected
                process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
        finally:
            process.kill()


FIRST = """
import signal
from kvarn.cli.interrupt import FirstInterruptEnds
with FirstInterruptEnds():
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        raise ImportError("as packages do")
"""


def test_an_interrupt_during_imports_is_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_handlers_are_restored() -> None:
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    with FirstInterruptEnds():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    with SecondInterruptEnds(), pytest.raises(KeyboardInterrupt):  # the first one is as always
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(before) == before
    assert not any(thread.name == "second-interrupt" for thread in threading.enumerate())


def test_other_threads_and_handlers_are_left_alone() -> None:
    def other() -> None:
        with FirstInterruptEnds(), SecondInterruptEnds():
            seen.append(signal.getsignal(signal.SIGINT))

    seen: list[object] = []
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_a_new_line_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal, written in ((True, "\n"), (False, "")):
        screen = io.StringIO()
        monkeypatch.setattr(screen, "isatty", lambda answer=is_terminal: answer)
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        end_line()
        assert screen.getvalue() == written
