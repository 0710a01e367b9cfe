"""`kvarn snapshot verify`: compute some tokens of a snapshot again, and compare their cells bit by bit."""

import argparse
import secrets

from kvarn.cli import flags
from kvarn.cli.manual import add_json_flag, describe
from kvarn.cli.progress import ProgressLine
from kvarn.cli.table import print_json
from kvarn.lasting.snapshot import SnapshotFile
from kvarn.loading.paths import user_path
from kvarn.words import counted


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Compute random tokens of a snapshot again and compare their keys and values with those in the file,
bit by bit. Context and cache type are those of the file, if they are not given.""",
        """
kvarn snapshot verify rules.kvs
kvarn snapshot verify book.kvs -m model.gguf --tokens 1000""",
        usage="FILE [OPTIONS]",
    )
    parser.add_argument("snapshot", metavar="FILE", help="a snapshot")
    some = "compute N tokens again; all of them, if the file has fewer or only a window (default: %(default)s)"
    parser.add_argument("--tokens", type=int, metavar="N", default=64, help=some)
    parser.add_argument("--seed", type=int, metavar="N", help="which tokens (default: random)")
    flags.add_model_flags(parser, context="the file's tokens", tiers=False)
    add_json_flag(parser)
    parser.set_defaults(cache="paged", cache_type=None)


def run(args: argparse.Namespace) -> None:
    flags.at_least(1, tokens=args.tokens)
    path, seed = user_path(args.snapshot), secrets.randbits(32) if args.seed is None else args.seed
    with SnapshotFile(path) as file:
        facts = file.facts
    args.cache_type = args.cache_type or f"{facts.fingerprint.k}/{facts.fingerprint.v}"
    args.context = facts.n_tokens + 64 if args.context is None else args.context
    llm = flags.load(args)
    with ProgressLine() as line:
        n = llm.snapshots.verify(path, args.tokens, seed, lambda done, total: line("computing again", done, total))
    if args.json:
        print_json({"file": args.snapshot, "tokens": facts.n_tokens, "compared": n, "equal": True, "seed": seed})
    else:
        of = f"{n:,} of {counted(facts.n_tokens, 'token')}"
        print(f"{args.snapshot}: the cells of {of} were computed again and are equal, bit by bit (seed {seed})")
