"""The `kvarn` command. Each subcommand is a module with `add` (its flags) and `run`, imported when it is needed."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

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
    parser = argparse.ArgumentParser(
        prog="kvarn", description="An inference engine for language models whose KV cache is the product."
    )
    parser.add_argument("--version", action="version", version=f"kvarn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        for name, summary in COMMANDS.items():
            command = commands.add_parser(name, help=summary, description=summary)
            if name in arguments[:1]:  # --help of the whole loads no command
                import_module(f"kvarn.cli.{name}").add(command)
        parsed = parser.parse_args(arguments)
        import_module(f"kvarn.cli.{parsed.command}").run(parsed)
    except KvarnError as error:
        print(f"kvarn: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader (head, less) has gone: nothing to say, and nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0
