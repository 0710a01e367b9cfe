"""`kvarn perplexity`: how well a model predicts a text, computed as llama.cpp does."""

import argparse

from kvarn.backends.cache_settings import context_of
from kvarn.cli import flags
from kvarn.cli.manual import add_json_flag, describe
from kvarn.cli.parser import UsageError
from kvarn.cli.progress import ProgressLine
from kvarn.cli.table import print_json
from kvarn.engine import scoring
from kvarn.words import counted


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Measure the perplexity of a text, as llama.cpp does: the text is cut into windows of the length
given with -c, and the second half of each window is scored. Lower is better.""",
        """
kvarn perplexity -f wiki.test.raw
kvarn perplexity model.gguf -f wiki.test.raw --chunks 40 --cache-type int8""",
    )
    parser.add_argument("-f", "--file", metavar="FILE", help="the text, in UTF-8; - reads standard input")
    parser.add_argument("--chunks", type=int, metavar="N", help="score only the first N windows")
    add_json_flag(parser)
    flags.add_model_flags(parser, context="512", tiers=False)
    parser.set_defaults(context=512)


def run(args: argparse.Namespace) -> None:
    if args.file is None:
        raise UsageError("give the text with -f FILE")
    text = flags.read_text(args.file)
    flags.at_least(1, chunks=args.chunks)
    llm = flags.load(args)
    window = context_of(llm.config, args.context)
    tokens = llm.tokenizer.encode(text)
    bos = llm.tokenizer.bos_id if llm.tokenizer.add_bos else None
    chunk = min(args.max_batch_tokens, window)
    with ProgressLine() as line:

        def progress(so_far: scoring.Perplexity, total: int) -> None:
            line(f"window {so_far.chunks} of {total}: {so_far.ppl:.4f}")

        result = scoring.perplexity(
            llm.program, llm.memory, llm.cache, tokens, window, args.chunks, bos, chunk, progress
        )
    if args.json:
        print_json(result._asdict())
    else:
        scored = f"{counted(result.tokens, 'token')} in {counted(result.chunks, 'window')}"
        print(f"perplexity {result.ppl:.4f} +/- {result.error:.4f} over {scored}")
