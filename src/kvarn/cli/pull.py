"""`kvarn pull`: download a model and print its path."""

import argparse
import sys

from kvarn.cli.manual import describe
from kvarn.cli.progress import ProgressLine
from kvarn.loading.pull import resolve


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Download a model, check it and print its path. A model that is already on this machine is not
downloaded again. The default model goes into the cache folder (KVARN_CACHE, default ~/.cache/kvarn),
models of the Hugging Face hub go into the cache of its library (HF_HOME, default
~/.cache/huggingface).""",
        """
kvarn pull
kvarn pull qwen3:0.6b
kvarn pull hf:org/repo/model.gguf""",
        usage="[MODEL] [OPTIONS]",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="smollm2",
        help="a name of `kvarn list --all`, or hf:org/repo[/file.gguf] (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> None:
    with ProgressLine() as line:
        path = resolve(args.model, progress=line, announce=announce)
    print(path)


def announce(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
