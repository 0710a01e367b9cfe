"""`kvarn explain`: what a server's request reused, what it recomputed, and why."""

import argparse
import json
import os
import time
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from kvarn.cli.table import speaks_utf8
from kvarn.errors import KvarnError


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", nargs="?", metavar="ID", help="of an answer (default: this key's last request)")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    key = os.environ.get("KVARN_API_KEY", "").split(",")[0] or None  # a server's variable may name several
    parser.add_argument("--api-key", default=key, help="the key that made the request (default: KVARN_API_KEY)")
    parser.add_argument("--json", action="store_true", help="print what the server says as JSON")


def run(args: argparse.Namespace) -> None:
    found = fetch(args)
    if args.json:
        print(json.dumps(found, indent=2, ensure_ascii=not speaks_utf8()))
        return
    print(f"{found['id']}, {time.strftime('%H:%M:%S', time.localtime(found['created']))}, {found['model']}")
    for prompt in found.get("prompts", [found]):
        show(prompt)


def fetch(args: argparse.Namespace) -> dict[str, Any]:
    path = f"/kvarn/requests/{quote(args.id, safe='')}" if args.id else "/kvarn/requests"
    base = args.url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise KvarnError(f"--url {args.url}: give it as http://HOST:PORT")
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    try:
        with urlopen(Request(base + path, headers=headers), timeout=30) as response:
            found: dict[str, Any] = json.load(response)
    except HTTPError as error:
        hint = "; give it with --api-key" if error.code == 401 else ""
        raise KvarnError(message_of(error) + hint) from None
    except (URLError, OSError, ValueError) as error:
        raise KvarnError(f"{base} does not answer: {getattr(error, 'reason', error)}") from None
    if args.id:
        return found
    if not found.get("data"):
        raise KvarnError("this key has made no request yet")
    last: dict[str, Any] = found["data"][0]
    return last


def message_of(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answers {error.code} {error.reason}"


def show(found: dict[str, Any]) -> None:
    prompt, reused, computed = (found[f"{name}_tokens"] for name in ("prompt", "reused", "recomputed"))
    ended, again = found["reuse_ended"] or {}, found["recomputed_after_preemption"]
    rows = [("prompt", f"{prompt} tokens")]
    if ended:
        rows += [
            ("reused", f"{reused} tokens ({100 * reused / prompt:.0f} %)"),
            ("computed", f"{computed} tokens in {found['recompute_ms']:.1f} ms"),
            ("because", found["because"]),
        ]
    if "ours" in ended and "theirs" in ended:
        rows += [("after", repr(ended["before"]))]
        for name, text in (("earlier", ended["theirs"]), ("now", ended["ours"])):
            rows += [(name, f"{text['onward']!r} (token {text['token']})")]
    if found["preemptions"]:
        rows += [("preempted", f"{found['preemptions']} times: {again['tokens']} tokens again, {again['ms']:.1f} ms")]
    if found["cancelled"]:
        missing = prompt - reused - computed
        rows += [("cancelled", f"with {missing} prompt tokens to go" if missing else "during its answer")]
    times = [(name, found[f"{key}_ms"]) for name, key in (("queued", "queued"), ("first token", "first_token"))]
    times += [("until then" if found["cancelled"] else "whole answer", found["total_ms"])]
    rows += [("times", ", ".join(f"{name} {ms:.1f} ms" for name, ms in times if ms is not None))]
    for name, value in rows:
        print(f"  {name:<10} {value}")
