"""The `kvarn` command. Each subcommand is a module with `add` (its flags) and `run`, imported when it is needed."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper

from kvarn import __version__
from kvarn.errors import KvarnError

COMMANDS = {
    "run": "continue a prompt",
    "chat": "hold a conversation",
    "serve": "answer OpenAI clients over HTTP",
    "explain": "say why a server computed a prompt again",
    "bench": "measure speed, alone or beside a peer; `bench serve` puts load on a server",
    "perplexity": "measure how well a model predicts a text",
    "inspect": "show a model's shape, tensors and cache sizes",
    "pull": "fetch a model",
    "strategies": "drive every cache strategy with the same keys and compare them",
}


def main(argv: Sequence[str] | None = None) -> int:
    try:
        _ready_streams()
        _dispatch(sys.argv[1:] if argv is None else list(argv))
    except KvarnError as error:
        print(f"kvarn: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader (head, less) has gone: nothing to say
        _give_up_output()
        return 141
    except OSError as error:  # a full disk behind standard output, for instance
        print(f"kvarn: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        _give_up_output()
        return 1
    return 0


def _dispatch(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="kvarn", description="An inference engine for language models whose KV cache is the product."
    )
    parser.add_argument("--version", action="version", version=f"kvarn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parsers = {name: commands.add_parser(name, help=text, description=text) for name, text in COMMANDS.items()}
    if arguments[:1] and arguments[0] in COMMANDS:  # --help of the whole loads no command
        import_module(f"kvarn.cli.{arguments[0]}").add(parsers[arguments[0]])
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:  # with the usage of the command that does not know them
        parsers[parsed.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    import_module(f"kvarn.cli.{parsed.command}").run(parsed)
    sys.stdout.flush()


def _ready_streams() -> None:
    """A stream that was closed before we came is an empty one; a terminal that has not all letters shows others."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (as long as the process)
        elif mode == "w" and isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def _give_up_output() -> None:
    """Nothing more can be written, also not what is still to be flushed at exit."""
    with suppress(OSError):  # an object that is no file needs no rescue
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
