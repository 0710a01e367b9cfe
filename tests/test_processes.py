"""An LLM in a forked process, and at the exit of the interpreter."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.serving import tiny_model

from kvarn import LLM, KvarnError, SamplingParams

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 512)


def forked(child) -> str:
    """What the child returned, as text. A child that hangs is ended by a signal."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            result = str(child())
        except BaseException as error:  # noqa: BLE001 (reported to the parent)
            result = f"{type(error).__name__}: {error}"
        os.write(writing, result.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        result = pipe.read().decode()
    assert os.waitpid(pid, 0)[1] == 0, "the child was ended by a signal"
    return result


@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_process_gets_an_error(model: Path, threads: int) -> None:
    llm = LLM(model, threads=threads)
    expected = llm.generate("ab", SHORT)[0].text
    stream = llm.stream("cd", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    for use in (lambda: llm.generate("ab"), lambda: next(stream), lambda: llm.chat([{"role": "user", "content": "x"}])):
        assert forked(use).startswith("KvarnError: this process was forked after the model was loaded")
    assert forked(stream.close) == forked(llm.close) == "None"
    assert llm.generate("ab", SHORT)[0].text == expected, "the parent goes on"
    stream.close()
    assert llm.cache.usage().sequences == 0


def test_a_forked_process_loads_a_model_of_its_own(model: Path) -> None:
    llm = LLM(model, threads=2)
    expected = llm.generate("ab", SHORT)[0].text
    assert forked(lambda: LLM(model, threads=2).generate("ab", SHORT)[0].text) == expected


def test_a_process_forked_in_the_middle_of_a_step(model: Path) -> None:
    """Another thread has the turn, and the pool's threads compute."""
    llm = LLM(model, threads=2)
    run, results = llm.program.run, []

    def forking(*arguments):
        if not results:
            results.append(forked(lambda: llm.generate("ab")))
        return run(*arguments)

    llm.engine.program.run = forking
    llm.generate("ab", SHORT)
    assert "in the middle of a step" in results[0]


def test_the_pool_refuses_a_forked_process(model: Path) -> None:
    """Also without the runner: scores and packing use the pool directly."""
    llm = LLM(model, threads=2)

    def compute() -> None:
        llm.engine.add([1, 2, 3], SHORT)
        llm.engine.step()

    assert forked(compute).startswith("RuntimeError: the threads of this pool belong to another process")


EXITS = {
    "a daemon thread computes": """
import threading, time
def loop():
    while True:
        llm.generate("ab", LONG)
        done.set()
done = threading.Event()
for _ in range(3): threading.Thread(target=loop, daemon=True).start()
done.wait()
""",
    "a daemon thread streams": """
import threading
def loop():
    for piece in llm.stream("ab", LONG): done.set()
done = threading.Event()
threading.Thread(target=loop, daemon=True).start()
done.wait()
""",
    "a stream is open": """
stream = llm.stream("ab", LONG)
next(stream)
""",
    "the only reference goes while a thread computes": """
import threading, gc
done = threading.Event()
def once(llm):
    for piece in llm.stream("ab", LONG): done.set()
thread = threading.Thread(target=once, args=(llm,))
thread.start()
done.wait()
del llm
gc.collect()
thread.join()
""",
    "asyncio, a task computes": """
import asyncio
from kvarn import AsyncLLM
async def main():
    model = AsyncLLM(llm)
    task = asyncio.create_task(model.generate("ab", LONG))
    async for piece in model.stream("cd", LONG): break
asyncio.run(main())
""",
    "an exit inside a loop": """
for piece in llm.stream("ab", LONG):
    raise SystemExit(0)
""",
}


@pytest.mark.parametrize("program", EXITS.values(), ids=EXITS)
def test_the_interpreter_exits_cleanly(model: Path, program: str) -> None:
    head = f"""
from kvarn import LLM, SamplingParams
llm = LLM({str(model)!r}, threads=2, max_seqs=4)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
"""
    for _ in range(2):
        ended = subprocess.run([sys.executable, "-c", head + program], capture_output=True, text=True, timeout=120)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_a_closed_llm_refuses_and_ends_what_is_open(model: Path) -> None:
    with LLM(model) as llm:
        stream = llm.stream("ab", SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream)
    with pytest.raises(KvarnError, match="closed before the answer was complete"):
        list(stream)
    with pytest.raises(KvarnError, match="this LLM is closed"):
        llm.generate("ab")
    llm.close()
    assert llm.cache.usage().sequences == 0
