"""`kvarn explain`: what a request to the server reused, what it computed, and why."""

import argparse
import time
from typing import Any
from urllib.parse import quote

from kvarn.bench.http import parse_address, request_json
from kvarn.cli.manual import add_json_flag, add_server_flags, describe
from kvarn.cli.table import print_json
from kvarn.engine.because import because, cancelled_at, remedy, restored
from kvarn.errors import KvarnError, printable
from kvarn.words import counted


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Show what a request to `kvarn serve` reused from the cache, what it computed, and why it did not
reuse more. An API key sees only its own requests.""",
        """
kvarn explain --api-key KEY
kvarn explain chatcmpl-1a2b3c --api-key KEY --json""",
        usage="[ID] [OPTIONS]",
    )
    parser.add_argument(
        "id", nargs="?", metavar="ID", help="id in the answer, or x-request-id (default: the last request of this key)"
    )
    add_server_flags(parser)
    add_json_flag(parser)


def run(args: argparse.Namespace) -> None:
    found = fetch(args)
    if args.json:
        print_json(found)
        return
    at = time.strftime("%H:%M:%S", time.localtime(found["created"]))
    print(printable(f"{found['id']}, {at}, {found['model']}"))
    for prompt in found.get("prompts", [found]):
        show(prompt)


def fetch(args: argparse.Namespace) -> dict[str, Any]:
    path = f"/kvarn/requests/{quote(args.id, safe='')}" if args.id else "/kvarn/requests"
    answer: dict[str, Any] = request_json(parse_address(args.url), "GET", path, api_key=args.api_key)
    if args.id:
        return answer
    if not answer.get("data"):
        raise KvarnError("this key has made no request yet" if args.api_key else "no request has been made yet")
    last: dict[str, Any] = answer["data"][0]
    return last


def show(found: dict[str, Any]) -> None:
    for name, value in rows_of(found):
        print(f"  {name:<10} {printable(value)}")


def rows_of(found: dict[str, Any]) -> list[tuple[str, str]]:
    """From the fields, not from the server's sentences: those are for people."""
    prompt, reused, computed = (found[f"{name}_tokens"] for name in ("prompt", "reused", "recomputed"))
    ended, again = found["reuse_ended"] or {}, found["recomputed_after_preemption"]
    rows = [("prompt", counted(prompt, "token"))]
    if ended:
        rows += [
            ("reused", f"{counted(reused, 'token')} ({100 * reused / prompt:.0f} %){restored(found)}"),
            ("computed", f"{counted(computed, 'token')} in {found['recompute_ms']:.1f} ms"),
            ("because", because(found) or ""),
            *_difference_rows(ended),
        ]
    if found["preemptions"]:
        often = counted(found["preemptions"], "time")
        rows += [("preempted", f"{often}: {counted(again['tokens'], 'token')} again, {again['ms']:.1f} ms")]
    if found["cancelled"]:
        rows += [("cancelled", cancelled_at(found))]
    stages = [(name, found[f"{key}_ms"]) for name, key in (("queued", "queued"), ("first token", "first_token"))]
    stages += [("until then" if found["cancelled"] else "whole answer", found["total_ms"])]
    return [*rows, ("times", ", ".join(f"{name} {ms:.1f} ms" for name, ms in stages if ms is not None))]


def _difference_rows(ended: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("line", repr(ended["line"]))] if "line" in ended else []
    if "ours" in ended and "theirs" in ended:
        rows += [("after", repr(ended["before"]))]
        for name, text in (("earlier", ended["theirs"]), ("now", ended["ours"])):
            rows += [(name, f"{text['onward']!r} (token {text['token']})")]
    if (advice := remedy(ended)) is not None:
        rows += [("remedy", advice)]
    return rows
