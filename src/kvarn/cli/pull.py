"""`kvarn pull`: fetch a model into the cache folder and say where it is."""

import argparse

from kvarn.cli.progress import ProgressLine
from kvarn.loading.pull import resolve


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2", help="a name, or hf:org/repo[/file.gguf]")


def run(args: argparse.Namespace) -> None:
    with ProgressLine() as line:
        path = resolve(args.model, progress=line)
    print(path)
