"""The `kvarn` command. A subcommand is a module with `add` (adds its flags) and `run`, imported when it is used."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from typing import Any

from kvarn import __version__
from kvarn.cli.manual import Manual
from kvarn.errors import BadLogits, KvarnError, printable

COMMANDS = {
    "run": "continue a prompt and print the text as it is computed",
    "chat": "hold a conversation in the terminal",
    "serve": "serve a model over HTTP with OpenAI's API",
    "explain": "show what a request to the server reused from the cache, and why not more",
    "bench": "measure speed, also in comparison with another engine",
    "perplexity": "measure how well a model predicts a text",
    "inspect": "show a model's shape, tensors and cache sizes",
    "pull": "download a model",
    "list": "list the models on this machine, or all names that kvarn knows",
    "rm": "remove models from this machine",
    "strategies": "run every cache strategy on the same data and compare them",
}
MODULES = {"list": "listing"}  # a module named `list` would hide Python's own here
DESCRIPTION = """\
An inference engine for language models. Its KV cache is the product. It runs GGUF files and
safetensors folders of the Llama, Qwen, Gemma 3 and Phi-3 families on the CPU."""
EPILOG = """\
A model is a name (smollm2), a .gguf file, a folder with safetensors files, or hf:org/repo.

examples:
  kvarn run -p "The quick brown fox"            continue a text with the default model
  kvarn chat -m model.gguf -c 8192              talk to a model of your own
  kvarn serve -m model.gguf --api-key KEY       http://127.0.0.1:8000/v1
  kvarn bench -m model.gguf -d 0,4096           speed with an empty cache and after 4096 tokens

environment:
  KVARN_CACHE        folder for models and the chat's history (default: ~/.cache/kvarn)
  KVARN_API_KEY      API keys for `serve`, separated by commas; the key that `explain` sends
  KVARN_ISA          instruction set: portable, avx2, avx512, avx512bf16, amx (default: the best here)
  KVARN_SUM_ORDER    order of bf16 sums: pairs or tiles (default: the faster one here)
  KVARN_PEER_PYTHON  Python with llama-cpp-python, for `bench --against llama-cpp-python`

`kvarn COMMAND --help` lists the options of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        _ready_streams()
        _dispatch(sys.argv[1:] if argv is None else list(argv))
    except (KvarnError, BadLogits) as error:
        print(f"kvarn: {printable(str(error), 2000)}", file=sys.stderr)
        return 1
    except MemoryError:
        print("kvarn: there is not enough memory: lower -c, -np, -b or --cache-bytes", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        _give_up_output()
        return 141
    except OSError as error:  # a full disk behind standard output, for instance
        print(f"kvarn: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        _give_up_output()
        return 1
    return 0


def _dispatch(arguments: list[str]) -> None:
    listed = "\n".join(f"  {name:<12} {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser("kvarn", "kvarn COMMAND [OPTIONS]", epilog=EPILOG, formatter_class=Manual)
    parser.description = f"{DESCRIPTION}\n\ncommands:\n{listed}"
    parser.add_argument("--version", action="version", version=f"kvarn {__version__}")
    commands = parser.add_subparsers(
        prog="kvarn", dest="command", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    parsers = {name: commands.add_parser(name, formatter_class=Manual) for name in COMMANDS}
    if arguments[:1] and arguments[0] in COMMANDS:  # --help of the whole loads no command
        _module(arguments[0]).add(parsers[arguments[0]])
    if not arguments:
        parser.print_help()
        return
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:  # with the usage of the command that does not know them
        parsers[parsed.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    _module(parsed.command).run(parsed)
    sys.stdout.flush()


def _module(command: str) -> Any:
    return import_module(f"kvarn.cli.{MODULES.get(command, command)}")


def _ready_streams() -> None:
    """Replace closed standard streams by /dev/null; replace characters that the terminal cannot encode."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (as long as the process)
        elif mode == "w" and isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def _give_up_output() -> None:
    """Send what is still buffered to /dev/null: flushing it at exit would fail again."""
    with suppress(OSError):  # standard output may be an object without a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
