"""`kvarn pull`: download a model into the cache folder and print its path."""

import argparse

from kvarn.cli.manual import describe
from kvarn.cli.progress import ProgressLine
from kvarn.loading.pull import resolve


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Download a model into the cache folder (KVARN_CACHE, default ~/.cache/kvarn), check it and print
its path. A model that is already in the folder is not downloaded again.""",
        """
kvarn pull
kvarn pull hf:org/repo/model.gguf""",
        usage="[MODEL] [OPTIONS]",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="smollm2",
        help="name, or hf:org/repo[/file.gguf] (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> None:
    with ProgressLine() as line:
        path = resolve(args.model, progress=line)
    print(path)
