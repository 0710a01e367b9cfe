"""Flags that several commands share, with llama.cpp's names, and the objects that are made from them."""

import argparse
import sys
from io import TextIOWrapper
from pathlib import Path

from kvarn.backends import BACKENDS
from kvarn.cache.codec import CODECS
from kvarn.cache.layouts import LAYOUTS
from kvarn.cache.strategy import NAMES
from kvarn.cli.progress import ProgressLine
from kvarn.engine.params import SamplingParams
from kvarn.errors import KvarnError
from kvarn.llm import LLM

UNBOUNDED = 1 << 30  # tokens: the context ends an answer first
SHORT = {"batch_size": "-b", "parallel": "-np", "ctx_size": "-c"}  # flags that people know by the short name
Flags = argparse.ArgumentParser | argparse._ArgumentGroup  # what takes `add_argument`
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_model_flag(parser: Flags) -> None:
    help = "name, .gguf file, safetensors folder or hf:org/repo (default: %(default)s)"
    parser.add_argument("-m", "--model", default="smollm2", help=help)


def add_compute_flags(parser: Flags) -> None:
    parser.add_argument(
        "-t",
        "--threads",
        type=int,
        metavar="N",
        help="threads, at most one per processor (default: one per physical core)",
    )
    backend = "cpu, or reference: simple, slow NumPy code for tests (default: %(default)s)"
    parser.add_argument("--backend", choices=BACKENDS, default="cpu", help=backend)


def add_model_flags(parser: argparse.ArgumentParser, max_seqs: int = 1, context: str = "up to 4096") -> None:
    """The model, and how it is run. `max_seqs` and `context` are the command's defaults."""
    group = parser.add_argument_group("model")
    add_model_flag(group)
    length = f"maximum tokens of prompt plus answer; 0: the context that the model was trained for (default: {context})"
    group.add_argument("-c", "--ctx-size", type=int, metavar="N", help=length)
    step = "maximum tokens computed in one step (default: %(default)s)"
    group.add_argument("-b", "--batch-size", type=int, metavar="N", default=512, help=step)
    beside = "maximum sequences computed at the same time (default: %(default)s)"
    group.add_argument("-np", "--parallel", type=int, metavar="N", default=max_seqs, help=beside)
    add_compute_flags(group)
    add_cache_flags(parser)


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cache")
    group.add_argument("--cache", choices=NAMES, default="auto", help="cache strategy (default: %(default)s)")
    cells = "number type of stored keys and values (default: %(default)s)"
    group.add_argument("--cache-type", choices=tuple(CODECS), default="bf16", help=cells)
    budget = "memory for keys and values (default: as much as the context needs)"
    group.add_argument("--cache-bytes", type=parse_bytes, metavar="N[K|M|G]", help=budget)
    add_block_flags(group)


def add_block_flags(group: Flags) -> None:
    order = "order of the bytes in a block (default: the backend's)"
    group.add_argument("--cache-layout", choices=tuple(LAYOUTS), help=order)
    group.add_argument("--block-size", type=int, metavar="N", help="tokens per block: a power of two, at least 16")
    group.add_argument("--window", type=int, metavar="N", help="a token sees itself and the N - 1 tokens before it")
    group.add_argument("--pinned", type=int, metavar="N", help="the first N tokens stay visible outside the window")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    length = "maximum tokens to generate; -1: until the text ends or the context is full (default: %(default)s)"
    group.add_argument("-n", "--predict", "--n-predict", type=int, metavar="N", default=128, help=length)
    for flag, kind, off, what in (
        ("--temp", float, 0.0, "temperature; 0 always takes the most likely token (default: 0)"),
        ("--top-k", int, 0, "sample from the N most likely tokens; 0 is off (default: 0)"),
        ("--top-p", float, 1.0, "sample from the most likely tokens of total probability N; 1 is off (default: 1)"),
        ("--min-p", float, 0.0, "drop tokens with less than N times the highest probability; 0 is off (default: 0)"),
        ("--repeat-penalty", float, 1.0, "penalty for tokens in the prompt or the answer; 1 is off (default: 1)"),
        ("--presence-penalty", float, 0.0, "penalty for tokens that are already in the answer; 0 is off (default: 0)"),
        ("--frequency-penalty", float, 0.0, "penalty for each time a token is in the answer; 0 is off (default: 0)"),
    ):
        group.add_argument(flag, type=kind, metavar="N", default=off, help=what)
    seed = "seed of sampling; the same seed gives the same text (default: random)"
    group.add_argument("--seed", type=int, metavar="N", help=seed)
    stop = "stop before this text; repeatable"
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop)
    group.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's end token")


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; - reads it from standard input")
    parser.add_argument("-f", "--file", help="read the prompt from a file")


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    trust = "recognize control tokens in the text of messages (default: they are plain text)"
    parser.add_argument("--trust-messages", action="store_true", help=trust)


def parse_bytes(text: str) -> int:
    unit = UNITS.get(text[-1:].upper(), 1)
    number = text[:-1] if text[-1:].upper() in UNITS else text
    try:
        return int(float(number) * unit)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes: give 500M or 2G") from None


def at_least(least: float, **given: float | None) -> None:
    """Refuse a flag (by its name in the parsed arguments) below `least`. A flag that was not given passes."""
    for name, value in given.items():
        if value is not None and not value >= least:
            flag = SHORT.get(name) or f"--{name.replace('_', '-')}"
            raise KvarnError(f"{flag} is {value}; it must be at least {least}")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    if args.predict < 1 and args.predict != -1:
        raise KvarnError(f"-n is {args.predict}; it must be at least 1, or -1 for no limit")
    return SamplingParams(
        max_tokens=UNBOUNDED if args.predict == -1 else args.predict,
        temperature=args.temp,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repeat_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )


def load(args: argparse.Namespace, trust_messages: bool = False, **engine: int) -> LLM:
    """The model that the flags describe. A terminal shows the progress of loading."""
    at_least(1, batch_size=args.batch_size, parallel=args.parallel)
    at_least(0, ctx_size=args.ctx_size)
    with ProgressLine() as line:
        return LLM(
            args.model,
            cache=args.cache,
            cache_type=args.cache_type,
            cache_layout=args.cache_layout,
            cache_bytes=args.cache_bytes,
            block_size=args.block_size,
            window=args.window,
            pinned=args.pinned,
            context=args.ctx_size,
            max_seqs=args.parallel,
            max_batch_tokens=args.batch_size,
            threads=args.threads,
            backend=args.backend,
            trust_messages=trust_messages,
            progress=line,
            **engine,
        )


def read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None and args.file is not None:
        raise KvarnError("give the prompt with -p TEXT, or with -f FILE, not both")
    if args.file is not None:
        return read_text(args.file)
    if args.prompt is not None:
        return read_input() if args.prompt == "-" else str(args.prompt)
    if sys.stdin.isatty() or not (piped := read_input()):
        raise KvarnError("give the prompt with -p TEXT, with -f FILE, or on standard input")
    return piped


def read_input() -> str:
    try:
        return sys.stdin.buffer.read().decode() if isinstance(sys.stdin, TextIOWrapper) else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise KvarnError(f"standard input is not UTF-8 text (byte {error.start}): convert it first") from None


def read_text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise KvarnError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise KvarnError(f"{name} is not UTF-8 text (byte {error.start}): convert it first") from None
