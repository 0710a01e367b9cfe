"""Flags and arguments that no machine can satisfy, or of the wrong type: one line, at once, without memory."""

import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.serving import tiny_model

from kvarn import LLM, KvarnError
from kvarn.cli import main

HUGE = 10**30
WINDOWS = ",".join(map(str, range(1, 100)))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


LINES = {
    "step": ("run -p x -b 1000000000", "a step of 1000000000 tokens would take .* GiB of workspace"),
    "step beyond 64 bits": (f"run -p x -b {HUGE}", "max_batch_tokens is 10+; it must be a whole number, .* at most"),
    "context": (f"run -p x -c {HUGE}", "context is 10+; positions are 32 bits"),
    "long context": ("run -p x -c 100000", "context 100,000: .*tiny.gguf was trained for 2,048 tokens"),
    "sequences": ("run -p x -np 1000000000", "max_seqs is 1000000000; 65536 is the most"),
    "sequences in a budget": ("run -p x --cache-bytes 1M -np 1000000000", "max_seqs is 1000000000; 65536 is the most"),
    "threads": ("run -p x -t 1000000000", "1000000000 threads; 1024 is the most"),
    "block": ("run -p x --block-size 1152921504606846976", "keys and values would take .* GiB and this machine has"),
    "window": (f"run -p x --window {HUGE}", "window is 10+; positions are 32 bits"),
    "pinned": (f"run -p x --pinned {HUGE}", "10+ pinned tokens do not fit a context of 2048"),
    "budget": ("run -p x --cache paged --cache-bytes 1e30", "keys and values would take .* GiB and this machine has"),
    "seed": (f"run -p x --seed {HUGE}", "seed is 10+; it must be a 64-bit integer"),
    "queue": (f"serve --port 0 --queue {HUGE}", "max_waiting is 10+; it must be a whole number"),
    "chunk": (f"serve --port 0 --chunk {HUGE}", "chunk_while_decoding is 10+; it must be a whole number"),
    "port": ("serve --port 1000000", "--port is 1000000; it must be between 0"),
    "no more than that": ("perplexity -f F -b 1000000000", "a step of 1000000000 tokens would take"),
    "window of text": (
        "perplexity -f F -c 1000000000",
        "context 1,000,000,000: .* was trained for 2,048 tokens",
    ),
    "compared step": ("compare -f F -b 1000000000", "a step of 1000000000 tokens would take"),
    "compared window": ("compare -f F -c 1000000000", "context 1,000,000,000: .* was trained for 2,048 tokens"),
    "compared caches": (f"compare -f F --cache ring --window {WINDOWS}", "these are .* caches, and 64 is the most"),
    "compared depth": ("compare -f F -c 64 -d 1000000000", "-d 1000000000: with -n 16 and -c 64, 46 is the most"),
    "compared tokens": ("compare -f F -c 64 -n 1000000000", "-n 1000000000 does not fit windows of 64 tokens"),
    "compared windows": ("compare -f F --windows 0", "--windows is 0; it must be at least 1"),
    "plot": ("compare -f F --plot /nowhere/a.svg", "/nowhere/a.svg: No such file or directory"),
    "bench step": ("bench -ub 1000000000", "a step of 1000000000 tokens would take .* GiB of workspace"),
    "bench depth": ("bench -d 1000000000", "was trained for 2048: lower -d"),
    "bench batch": ("bench -b 1000000000", "a batch of 1000000000 does not fit a step of 512 tokens"),
    "random data": ("strategies --head-dim 1000000000", "the random data would take .* TiB"),
    "heads": ("strategies --heads 1000000000/1000000000", "the random data would take .* TiB"),
    "head": ("strategies --head-dim 1024", "heads of 1024 numbers: the cpu backend has kernels up to 256"),
}


@pytest.mark.parametrize(("line", "message"), LINES.values(), ids=LINES)
def test_absurd_flags_get_one_line(tiny: Path, capsys: pytest.CaptureFixture, line: str, message: str) -> None:
    command, *flags = line.replace(" F ", f" {tiny.with_name('text')} ").split()
    tiny.with_name("text").write_text("hello " * 2000)
    model = [] if command == "strategies" else ["-m", str(tiny)]
    assert main([command, *model, *flags]) == 1
    said = capsys.readouterr()
    assert re.search(message, said.err), said.err
    assert said.err.startswith(f"kvarn {command}: ")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    "flag", ["-b", "-c", "-np", "-t", "-n", "--block-size", "--window", "--pinned", "--cache-bytes"]
)
@pytest.mark.parametrize("value", ["x", "1.5.2", "9" * 5000])
def test_what_is_no_number_is_a_usage_error(capsys: pytest.CaptureFixture, flag: str, value: str) -> None:
    assert main(["run", flag, value]) == 2
    error_text = capsys.readouterr().err
    assert re.fullmatch(
        rf"kvarn run: {flag} is '.{{1,60}}'; it must be a (whole number|number of bytes, .*)\n", error_text
    )


def test_no_memory_is_taken_for_a_refusal(tiny: Path) -> None:
    """With 3 GiB of address space, which the largest step would exceed."""
    command = [sys.executable, "-c", "import sys; from kvarn.cli import main; sys.exit(main())"]
    done = subprocess.run(
        [*command, "run", "-m", str(tiny), "-p", "x", "-b", "1000000000"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)),
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr


ARGUMENTS: list[dict[str, Any]] = [
    {"max_seqs": "x"},
    {"max_seqs": 0},
    {"max_seqs": None},
    {"context": 1.5},
    {"context": "x"},
    {"context": -1},
    {"max_batch_tokens": -1},
    {"max_batch_tokens": "x"},
    {"max_batch_tokens": 1.5},
    {"max_batch_tokens": None},
    {"max_batch_tokens": HUGE},
    {"threads": 0},
    {"threads": "x"},
    {"threads": 1.5},
    {"threads": HUGE},
    {"block_size": 0},
    {"block_size": "x"},
    {"window": 0},
    {"window": HUGE},
    {"pinned": -1},
    {"pinned": 1.5},
    {"cache_bytes": -1},
    {"cache_bytes": "1G"},
    {"chunk_while_decoding": 0},
    {"chunk_while_decoding": "x"},
    {"max_waiting": 1.5},
    {"cache": []},
    {"cache": 5},
    {"cache_type": {}},
    {"cache_layout": 7},
    {"backend": "gpu9"},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_wrong_arguments_of_the_python_api(tiny: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(KvarnError) as error:
        LLM(tiny, **({"context": 128} | arguments))
    assert str(error.value).isprintable()
