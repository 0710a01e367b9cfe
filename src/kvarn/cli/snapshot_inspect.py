"""`kvarn snapshot inspect`: what is in a snapshot, and whether it is whole. No model is needed."""

import argparse
import time
from dataclasses import asdict
from typing import Any

from kvarn.cli.manual import add_json_flag, describe
from kvarn.cli.table import print_json
from kvarn.errors import printable
from kvarn.lasting.snapshot import Facts, SnapshotFile
from kvarn.loading.paths import user_path
from kvarn.words import counted, file_size


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Show what a snapshot holds and what it was made with, and compare its digests: a damaged file is an
error. No model is loaded. `kvarn snapshot verify` also computes tokens again.""",
        """
kvarn snapshot inspect rules.kvs
kvarn snapshot inspect rules.kvs --json""",
        usage="FILE [OPTIONS]",
    )
    parser.add_argument("snapshot", metavar="FILE", help="a snapshot")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> None:
    with SnapshotFile(user_path(args.snapshot)) as file:
        file.check()
        facts = file.facts
    if args.json:
        print_json({"file": args.snapshot, **facts_to_json(facts)})
    else:
        show(args.snapshot, facts)


def facts_to_json(facts: Facts) -> dict[str, Any]:
    answer = facts.answer
    return {
        "bytes": facts.nbytes,
        "kvarn": facts.kvarn,
        "created": facts.created,
        "model": facts.model,
        "tokens": facts.n_tokens,
        "tokens_held": held(facts),
        "fingerprint": asdict(facts.fingerprint),
        "answer": None
        if answer is None
        else {"tokens": facts.n_tokens - answer.start, "seed": answer.seed, "sample": answer.sample},
        "conversation": facts.has_chat,
    }


def held(facts: Facts) -> int:
    """Tokens whose cells are in the file, in the layer that has fewest."""
    return facts.n_tokens - max(map(len, facts.holes), default=0)


def show(name: str, facts: Facts) -> None:
    made = facts.fingerprint
    some = "" if held(facts) == facts.n_tokens else f"; cells of {held(facts):,} (the window)"
    cells = made.k if made.k == made.v else f"{made.k} keys, {made.v} values"
    rows = [
        ("file", f"{name}, {file_size(facts.nbytes)}, complete"),
        ("text", counted(facts.n_tokens, "token") + some),
        ("model", f"{facts.model} (weights {made.model[:12]})"),
        ("cells", f"{cells}, windows: {made.windows}"),
        ("bits", ", ".join(filter(None, (made.backend, made.device, made.order, f"arithmetic {made.arithmetic}")))),
        ("made", f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(facts.created))}, kvarn {facts.kvarn}"),
    ]
    if facts.answer is not None:
        begun = counted(facts.n_tokens - facts.answer.start, "token")
        rows.append(("answer", f"{begun} so far, seed {facts.answer.seed}; kvarn run --snapshot goes on with it"))
    if facts.has_chat:
        rows.append(("chat", "a conversation; kvarn chat --session goes on with it"))
    for key, value in rows:
        print(f"{key:<7} {printable(value)}")
