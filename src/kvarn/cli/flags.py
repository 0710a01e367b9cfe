"""Flags that several commands share, and the objects that are made from them.

A flag has the name of its setting in Python (`LLM`, `SamplingParams`). llama.cpp's names are aliases.
"""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import fields
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from kvarn.backends import AUTO, BACKENDS
from kvarn.cache.codec import CODECS, cache_types
from kvarn.cache.layouts import LAYOUTS
from kvarn.cache.strategy import NAMES
from kvarn.cli.parser import UsageError, did_you_mean, shown
from kvarn.cli.progress import ProgressLine
from kvarn.engine.params import UNBOUNDED, SamplingParams
from kvarn.errors import KvarnError
from kvarn.llm import LLM
from kvarn.loading.catalogue import DEFAULT_MODEL
from kvarn.words import bytes_of

SHORT = {"max_tokens": "-n", "max_batch_tokens": "-b", "max_seqs": "-np", "context": "-c"}  # known by the short name
Flags = argparse.ArgumentParser | argparse._ArgumentGroup  # what takes `add_argument`


def add_model_flag(parser: argparse.ArgumentParser, group: Flags | None = None) -> None:
    """The model, as a word or with -m."""
    to, help = group or parser, f"name, .gguf file, safetensors folder or hf:org/repo (default: {DEFAULT_MODEL})"
    to.add_argument("model_word", metavar="MODEL", nargs="?", help=help)
    to.add_argument("-m", "--model", help="the model, as an option")
    parser.set_defaults(settle=choose_model)
    usage = parser.usage or f"{parser.prog} [OPTIONS]"
    if "[MODEL]" not in usage:
        parser.usage = usage.replace("[OPTIONS]", "[MODEL] [OPTIONS]")


def choose_model(args: argparse.Namespace) -> None:
    if args.model is not None and args.model_word is not None:
        raise UsageError(f"the model is given twice, as {args.model_word!r} and with -m {args.model}: leave one out")
    given = args.model_word if args.model is None else args.model
    args.model = DEFAULT_MODEL if given is None else given


def add_compute_flags(parser: Flags) -> None:
    parser.add_argument(
        "-t",
        "--threads",
        type=int,
        metavar="N",
        help="threads of the CPU, at most one per processor (default: one per physical core)",
    )
    backend = (
        "cpu; cuda: an NVIDIA GPU; reference: simple, slow NumPy code for tests; "
        "auto: cuda if it can run the model, else cpu (default: %(default)s)"
    )
    parser.add_argument("--backend", choices=(AUTO, *BACKENDS), default=AUTO, help=backend)


def add_model_flags(
    parser: argparse.ArgumentParser, max_seqs: int = 1, context: str = "up to 4096", tiers: bool = True
) -> None:
    """The model, and how it is run. `max_seqs` and `context` are the command's defaults. `tiers`: whether the command
    has prompts that can reuse something."""
    group = parser.add_argument_group("model")
    add_model_flag(parser, group)
    length = f"maximum tokens of prompt plus answer; 0: the context that the model was trained for (default: {context})"
    group.add_argument("-c", "--context", "--ctx-size", type=int, metavar="N", help=length)
    step = "maximum tokens computed in one step (default: %(default)s)"
    group.add_argument("-b", "--max-batch-tokens", "--batch-size", type=int, metavar="N", default=512, help=step)
    beside = "maximum sequences computed at the same time (default: %(default)s)"
    group.add_argument("-np", "--max-seqs", "--parallel", type=int, metavar="N", default=max_seqs, help=beside)
    add_compute_flags(group)
    add_cache_flags(parser, tiers)


def add_cache_flags(parser: argparse.ArgumentParser, tiers: bool) -> None:
    group = parser.add_argument_group("cache")
    group.add_argument("--cache", choices=NAMES, default="auto", help="cache strategy (default: %(default)s)")
    add_cache_type_flags(group, "bf16")
    budget = "memory for keys and values (default: what the context needs; with cuda, what the device has left)"
    group.add_argument("--cache-bytes", type=parse_bytes, metavar="N[K|M|G]", help=budget)
    if tiers:
        add_tier_flags(group)
    add_block_flags(group)


def add_cache_type_flags(group: Flags, default: str) -> None:
    cells = "number type of stored keys and values, or K/V, as in int8/bf16 (default: %(default)s)"
    group.add_argument("--cache-type", choices=cache_types(), default=default, help=cells)
    for letter, what in (("k", "keys"), ("v", "values")):
        help = f"number type of stored {what} (default: that of --cache-type)"
        group.add_argument(f"-ct{letter}", f"--cache-type-{letter}", choices=tuple(CODECS), help=help)


def cache_type_of(args: argparse.Namespace) -> str:
    """What --cache-type, -ctk and -ctv say together."""
    k, _, v = args.cache_type.partition("/")
    k, v = args.cache_type_k or k, args.cache_type_v or v or k
    return str(k if k == v else f"{k}/{v}")


def add_host_cache_flag(group: Flags) -> None:
    host = "host memory for blocks that the cache evicts (default: none)"
    group.add_argument("--host-cache", type=parse_bytes, metavar="N[K|M|G]", help=host)


def add_tier_flags(group: Flags) -> None:
    add_host_cache_flag(group)
    disk = "folder for evicted blocks, which a restart finds again; at most 10G, or as much as is given (default: none)"
    group.add_argument("--disk-cache", metavar="DIR[:N[K|M|G]]", help=disk)


def add_block_flags(group: Flags) -> None:
    order = "order of the bytes in a block (default: the backend's)"
    group.add_argument("--cache-layout", choices=tuple(LAYOUTS), help=order)
    group.add_argument("--block-size", type=int, metavar="N", help="tokens per block: a power of two, at least 16")
    group.add_argument("--window", type=int, metavar="N", help="a token sees itself and the N - 1 tokens before it")
    group.add_argument("--pinned", type=int, metavar="N", help="the first N tokens stay visible outside the window")


def add_sampling_flags(parser: argparse.ArgumentParser, limit: str, unset: str = "the model's own") -> None:
    """`limit` is the command's default of -n, `unset` those of the flags whose help names none."""
    group = parser.add_argument_group("sampling", f"Other defaults are {unset}.")
    length = f"maximum tokens to generate; -1: until the text ends or the context is full (default: {limit})"
    names = ("-n", "--max-tokens", "--predict", "--n-predict")
    group.add_argument(*names, type=int, metavar="N", help=length)
    heat = "randomness: 0 always takes the most likely token, 1 samples as the model was trained"
    group.add_argument("--temperature", "--temp", type=float, metavar="N", help=heat)
    group.add_argument("--top-k", type=int, metavar="N", help="sample from the N most likely tokens; 0 is off")
    mass = "sample from the most likely tokens of total probability N; 1 is off"
    group.add_argument("--top-p", type=float, metavar="N", help=mass)
    share = "drop tokens with less than N times the highest probability; 0 is off"
    group.add_argument("--min-p", type=float, metavar="N", help=share)
    again = "penalty for tokens in the prompt or the answer; 1 is off"
    group.add_argument("--repetition-penalty", "--repeat-penalty", type=float, metavar="N", help=again)
    for flag, what in (
        ("--presence-penalty", "penalty for tokens that are already in the answer; 0 is off (default: 0)"),
        ("--frequency-penalty", "penalty for each time a token is in the answer; 0 is off (default: 0)"),
    ):
        group.add_argument(flag, type=float, metavar="N", help=what)
    seed = "seed of sampling; the same seed gives the same text (default: random)"
    group.add_argument("--seed", type=int, metavar="N", help=seed)
    stop = "stop before this text; repeatable"
    group.add_argument("--stop", action="append", metavar="TEXT", help=stop)
    ids = "stop at these token ids"
    group.add_argument("--stop-token-ids", type=parse_ids, metavar="N,..", help=ids)
    group.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's end token")
    add_structure_flags(parser)


def add_structure_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("structure of the answer", "Give at most one of them.")
    schema = "JSON of this schema: a file, or the schema itself"
    group.add_argument("--json-schema", type=schema_text, metavar="FILE", help=schema)
    group.add_argument("--regex", metavar="RE", help="a text that matches this regular expression as a whole")
    group.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts; repeatable")
    group.add_argument("--grammar", metavar="TEXT", help="a text of this grammar, in Lark's syntax or in GBNF")
    file = "a text of the grammar in this file"
    group.add_argument("--grammar-file", type=file_text, metavar="FILE", help=file)


def add_snapshot_flag(parser: Flags) -> None:
    begin = "begin with the text of a snapshot (kvarn snapshot make), which need not be computed then"
    parser.add_argument("--snapshot", metavar="FILE", help=begin)


def add_map_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--map", action="store_true", help="show the cache's blocks below the answer; on terminals")


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    trust = "recognize control tokens in the text of messages (default: they are plain text)"
    parser.add_argument("--trust-messages", action="store_true", help=trust)


class Names:
    """The type of an option that takes known names with commas between them."""

    def __init__(self, known: Iterable[str]) -> None:
        self.known = known if isinstance(known, tuple) else tuple(known)

    def __call__(self, text: str) -> list[str]:
        names = [part.strip() for part in text.split(",")]
        for name in names:
            if name not in self.known:
                one_of = f"is {shown(name)!r}; it must be one of {', '.join(self.known)}"
                raise argparse.ArgumentTypeError(one_of + did_you_mean(name, self.known))
        return list(dict.fromkeys(names))


def rarest(names: Iterable[str]) -> str:
    """The cache type that fewest backends have: later codecs are in fewer, and a pair is in fewer than its codecs."""

    def rank(name: str) -> tuple[int, int]:
        parts = name.split("/")
        return len(parts), max(list(CODECS).index(part) for part in parts)

    return max(names, key=rank)


def parse_bytes(text: str) -> int:
    found = bytes_of(text)
    if found is None:
        bytes = f"is {shown(text)!r}; it must be a number of bytes, as in 500M or 2G"
        raise argparse.ArgumentTypeError(bytes)
    return found


def parse_ids(text: str) -> tuple[int, ...]:
    try:
        ids = tuple(int(part) for part in text.split(","))
    except ValueError:
        ids = (-1,)
    if min(ids) < 0:
        words = f"is {shown(text)!r}; it must be token ids with commas between them, as in 1,2"
        raise argparse.ArgumentTypeError(words)
    return ids


def schema_text(given: str) -> str:
    return given if given.lstrip().startswith("{") else file_text(given)


def file_text(name: str) -> str:
    try:
        return read_text(name)
    except KvarnError as error:
        raise argparse.ArgumentTypeError(f"cannot be read: {error}") from None


def at_least(least: float, **given: float | None) -> None:
    """Refuse a flag (by its name in the parsed arguments) below `least`. A flag that was not given passes."""
    for name, value in given.items():
        if value is not None and not value >= least:
            flag = SHORT.get(name) or f"--{name.replace('_', '-')}"
            raise KvarnError(f"{flag} is {value}; it must be at least {least}")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """From the flags that were given. The others keep the defaults of SamplingParams."""
    if args.max_tokens < 1 and args.max_tokens != -1:
        raise KvarnError(f"-n is {args.max_tokens}; it must be at least 1, or -1 for no limit")
    given = {each.name: getattr(args, each.name, None) for each in fields(SamplingParams)}
    if getattr(args, "grammar_file", None) is not None:
        if given["grammar"] is not None:
            raise UsageError("--grammar and --grammar-file were given: leave one out")
        given["grammar"] = args.grammar_file
    given["max_tokens"] = UNBOUNDED if args.max_tokens == -1 else args.max_tokens
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def cache_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of a cache, by their names in `LLM`."""
    at_least(1, max_batch_tokens=args.max_batch_tokens, max_seqs=args.max_seqs)
    at_least(0, context=args.context, pinned=args.pinned)
    at_least(1, window=args.window)
    names = ("cache", "cache_type", "cache_layout", "cache_bytes", "block_size", "window", "pinned", "context")
    given = {name: getattr(args, name) for name in (*names, "max_seqs", "max_batch_tokens")}
    return given | {"cache_type": cache_type_of(args)}


def load(args: argparse.Namespace, trust_messages: bool = False, **engine: Any) -> LLM:
    """The model that the flags describe. A terminal shows the progress of loading."""
    settings = cache_settings(args)
    with ProgressLine() as line:
        return LLM(
            args.model,
            **settings,
            host_cache=getattr(args, "host_cache", None),
            disk_cache=getattr(args, "disk_cache", None),
            threads=args.threads,
            backend=args.backend,
            trust_messages=trust_messages,
            progress=line,
            **engine,
        )


def read_text(name: str) -> str:
    """The text of a file; - is standard input."""
    if name == "-":
        return read_input()
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise KvarnError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise KvarnError(f"{name} is not UTF-8 text (byte {error.start}): convert it first") from None


def read_input() -> str:
    try:
        return sys.stdin.buffer.read().decode() if isinstance(sys.stdin, TextIOWrapper) else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise KvarnError(f"standard input is not UTF-8 text (byte {error.start}): convert it first") from None
