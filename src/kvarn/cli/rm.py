"""`kvarn rm`: removes the files of models from this machine."""

import argparse
import sys

from kvarn.cli.manual import describe
from kvarn.errors import KvarnError, printable
from kvarn.loading.removal import remove
from kvarn.loading.stored import find, stored_models
from kvarn.words import file_size


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Remove the files of models. `kvarn list` shows the names. On a terminal the command asks first,
unless -y is given.""",
        """
kvarn rm qwen3:0.6b
kvarn rm -y hf:org/repo/model.gguf smollm2""",
        usage="NAME... [OPTIONS]",
    )
    parser.add_argument("names", metavar="NAME", nargs="+", help="a name as `kvarn list` shows it, or a path")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> None:
    models = stored_models()
    chosen = find(args.names, models)
    if not args.yes:
        if not sys.stdin.isatty():
            raise KvarnError("without a terminal to ask on, nothing is removed; give -y to remove without a question")
        listed = ", ".join(f"{printable(model.name)} ({file_size(model.bytes)})" for model in chosen)
        if not agreed(f"remove {listed}? [y/N] "):
            print("nothing was removed")
            return
    freed = remove(chosen, models)
    print(f"removed {', '.join(printable(model.name) for model in chosen)}; {file_size(freed)} freed")


def agreed(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        print()
        return False
