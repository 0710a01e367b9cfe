"""The `kvarn` command. A subcommand is a module with `add` (adds its flags) and `run`, imported when it is used.

Exit statuses: 0 done, 1 an error, 2 a wrong command line, 130 Ctrl-C, 141 the reader of the output has left.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from importlib import import_module
from io import TextIOWrapper
from typing import Any

from kvarn import __version__
from kvarn.cli.interrupt import STATUS, Failed, FirstInterruptEnds, Interrupted, SecondInterruptEnds, end_line
from kvarn.cli.manual import wrapped
from kvarn.cli.parser import Parser, UsageError, did_you_mean
from kvarn.errors import BadLogits, KvarnError, printable

COMMANDS = {
    "run": "continue a prompt and print the text as it is computed",
    "chat": "hold a conversation in the terminal",
    "serve": "serve a model over HTTP with OpenAI's API",
    "snapshot make": "compute a text once and keep its cells in a file",
    "snapshot inspect": "show what a snapshot holds, and whether it is whole",
    "snapshot verify": "compute tokens of a snapshot again and compare the bits",
    "explain": "show what a request to the server reused from the cache, and why not more",
    "bench": "measure speed, also in comparison with another engine",
    "bench serve": "send load to a server and measure its speed",
    "perplexity": "measure how well a model predicts a text",
    "compare": "compare cache strategies, number types and windows on a model and a text",
    "plan": "say what a model needs and how fast it is, before it is loaded",
    "inspect": "show a model's shape, tensors and cache sizes (also: show)",
    "pull": "download a model",
    "list": "list the models on this machine, or all names that kvarn knows (also: ls)",
    "rm": "remove models from this machine",
    "strategies": "run every cache strategy on the same data and compare them",
    "completion": "print a script that completes commands and options in bash, zsh or fish",
    "help": "show this text, or the help of a command",
}
# Where the module has another name than the command: a module named `list` would hide Python's own here.
MODULES = {
    "bench serve": "bench_serve",
    "list": "listing",
    **{f"snapshot {verb}": f"snapshot_{verb}" for verb in ("make", "inspect", "verify")},
}
HANDLE_INTERRUPTS = {"chat", "serve", "bench serve"}  # they go on after a Ctrl-C, at least for a while
ALIASES = {"ls": "list", "show": "inspect"}
DESCRIPTION = """\
An inference engine for language models. Its KV cache is the product. It runs GGUF files and
safetensors folders of the Llama, Qwen, Gemma 3 and Phi-3 families, on the CPU or an NVIDIA GPU."""
EPILOG = """\
A model is a name (smollm2), a .gguf file, a folder with safetensors files, or hf:org/repo.

examples:
  kvarn run "The quick brown fox"               continue a text with the default model
  kvarn chat model.gguf -c 8192                 talk to a model of your own
  kvarn serve model.gguf --api-key KEY          http://127.0.0.1:8000/v1
  kvarn bench model.gguf -d 0,4096              speed with an empty cache and after 4096 tokens

environment:
  KVARN_CACHE        folder for models and the chat's history (default: ~/.cache/kvarn)
  KVARN_API_KEY      API keys for `serve`, separated by commas; the key that `explain` sends
  KVARN_ISA          instruction set: portable, avx2, avxvnni, avx512, avx512bf16, amx (default: the best here)
  KVARN_SUM_ORDER    order of bf16 sums: pairs or tiles (default: the faster one here)
  KVARN_PEER_PYTHON  Python with llama-cpp-python, for `bench --against llama-cpp-python`

`kvarn COMMAND --help` lists the options of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    command = ""
    try:
        has_output = _ready_streams()
        command, arguments = split_command(sys.argv[1:] if argv is None else list(argv))
        if not has_output and command != "serve":
            raise KvarnError("standard output is closed, so the result would be lost: remove >&-, or use >/dev/null")
        _dispatch(command, arguments)
    except (KvarnError, BadLogits) as error:
        return _fail(command, str(error), 2 if isinstance(error, UsageError) else 1)
    except MemoryError:
        return _fail(command, "there is not enough memory: lower -c, -np, -b or --cache-bytes")
    except Failed:
        return 1
    except Interrupted:
        return STATUS
    except KeyboardInterrupt:
        end_line()
        return STATUS
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        _give_up_output()
        return 141
    except OSError as error:  # a full disk behind standard output, for instance
        _give_up_output()
        return _fail(command, f"{error.filename or 'output'}: {error.strerror or error}")
    return 0


def _fail(command: str, message: str, status: int = 1) -> int:
    print(f"kvarn {command}".rstrip() + f": {printable(message, 2000)}", file=sys.stderr)
    return status


def split_command(arguments: list[str]) -> tuple[str, list[str]]:
    """The command and its arguments. `kvarn help COMMAND` is `kvarn COMMAND --help`."""
    if not arguments or arguments[0] in ("-h", "--help"):
        return "help", []
    first = arguments[0]
    if first in ("--version", "version"):
        return "--version", []
    first = ALIASES.get(first, first)
    if first.startswith("-"):
        raise UsageError(f"there is no option {first} before a command: kvarn COMMAND [OPTIONS]")
    if first == "help" and arguments[1:] not in ([], ["-h"], ["--help"]):
        command, _ = split_command(arguments[1:])
        return command, ["--help"]
    if " ".join(arguments[:2]) in COMMANDS:
        return " ".join(arguments[:2]), arguments[2:]
    if verbs := [name for name in COMMANDS if name.startswith(f"{first} ") and first not in COMMANDS]:
        raise UsageError(f"kvarn {first} needs one more word: {', '.join(verbs)}")
    if first not in COMMANDS:
        raise UsageError(f"there is no command {first!r}{did_you_mean(first, COMMANDS)} (kvarn --help lists them)")
    return first, arguments[1:]


def _dispatch(command: str, arguments: list[str]) -> None:
    if command == "--version":
        print(f"kvarn {__version__}")
    elif command == "help":
        print(help_text())
    else:
        with FirstInterruptEnds():
            _module(command)
        parsed = parser_of(command).parse(arguments)
        if parsed is not None:
            command = vars(parsed).pop("command", command)  # `run` without a prompt is `chat`
            with nullcontext() if command in HANDLE_INTERRUPTS else SecondInterruptEnds():
                _module(command).run(parsed)
    sys.stdout.flush()


def parser_of(command: str) -> Parser:
    parser = Parser(f"kvarn {command}")
    _module(command).add(parser)
    return parser


def _module(command: str) -> Any:
    return import_module(f"kvarn.cli.{MODULES.get(command, command)}")


def help_text() -> str:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}} {text}" for name, text in COMMANDS.items())
    usage = "usage: kvarn COMMAND [OPTIONS]; kvarn --version"
    return f"{usage}\n\n{wrapped(DESCRIPTION)}\n\ncommands:\n{listed}\n\n{EPILOG}"


def _ready_streams() -> bool:
    """Replace closed standard streams by /dev/null; replace characters that the terminal cannot encode. Whether
    standard output was open."""
    has_output = sys.stdout is not None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (as long as the process)
        elif mode == "w" and isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    return has_output


def _give_up_output() -> None:
    """Send what is still buffered to /dev/null: flushing it at exit would fail again."""
    with suppress(OSError):  # standard output may be an object without a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
