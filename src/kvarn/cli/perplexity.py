"""`kvarn perplexity`: how well a model predicts a text, by llama.cpp's protocol."""

import argparse
import json
import sys

from kvarn.cli import flags
from kvarn.engine import scoring
from kvarn.llm import context_of


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--file", required=True, help="the text")
    parser.add_argument("--chunks", type=int, help="score only the first N windows")
    flags.add_model_flags(parser, context="512")
    flags.add_json_flag(parser)
    parser.set_defaults(ctx_size=512)


def run(args: argparse.Namespace) -> None:
    text = flags.read_text(args.file)
    flags.at_least(1, chunks=args.chunks)
    llm = flags.load(args)
    window = context_of(llm.config, args.ctx_size)
    tokens = llm.tokenizer.encode(text)
    watched = sys.stderr.isatty()

    def progress(so_far: scoring.Perplexity, total: int) -> None:
        if watched:
            print(f"\r[{so_far.chunks}/{total}] {so_far.ppl:.4f} ", end="", file=sys.stderr, flush=True)

    bos = llm.tokenizer.bos_id if llm.tokenizer.add_bos else None
    chunk = min(args.batch_size, window)
    result = scoring.perplexity(llm.program, llm.memory, llm.cache, tokens, window, args.chunks, bos, chunk, progress)
    if watched:
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    if args.json:
        print(json.dumps(result._asdict()))
    else:
        scored = f"{result.tokens} tokens in {result.chunks} windows"
        print(f"perplexity {result.ppl:.4f} +/- {result.error:.4f} over {scored}")
