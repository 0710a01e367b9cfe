"""`kvarn pull`: download models and print their paths."""

import argparse

from kvarn.cli.manual import describe
from kvarn.cli.progress import ProgressLine
from kvarn.loading.catalogue import DEFAULT_MODEL
from kvarn.loading.names import meaning
from kvarn.loading.pull import resolve


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Download models, check them and print their paths, one per line. A model that is already on this
machine is not downloaded again. The default model goes into the cache folder (KVARN_CACHE, default
~/.cache/kvarn), models of the Hugging Face hub go into the cache of its library (HF_HOME, default
~/.cache/huggingface).""",
        """
kvarn pull
kvarn pull qwen3:0.6b llama3.2:1b
kvarn pull hf:org/repo:Q4_K_M
kvarn pull hf:org/repo/model.gguf""",
        usage="[MODEL...] [OPTIONS]",
    )
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="*",
        help="a name of `kvarn list --all`, or hf:org/repo, with :Q4_K_M or /file.gguf (default: smollm2)",
    )


def run(args: argparse.Namespace) -> None:
    names = args.models or [DEFAULT_MODEL]
    for name in names:
        meaning(name)  # a misspelt name is found before anything is downloaded
    for name in names:
        with ProgressLine() as line:
            path = resolve(name, progress=line, announce=line.say)
        print(path, flush=True)
