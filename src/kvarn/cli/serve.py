"""`kvarn serve`: one model over HTTP with OpenAI's API, with metrics and explanations."""

import argparse
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from kvarn.cli import flags
from kvarn.cli.interrupt import end_line
from kvarn.cli.manual import describe
from kvarn.cli.table import backend_words, human_bytes
from kvarn.errors import KvarnError, printable
from kvarn.forecast.memory import resident_bytes
from kvarn.lasting.collection import Collection
from kvarn.llm import LLM
from kvarn.loading.paths import user_path
from kvarn.server.access import Access
from kvarn.server.app import READER_SECONDS, Service
from kvarn.server.connection_limits import HEAD_SECONDS, limits_for, raise_file_limit
from kvarn.server.log_lines import Log, LogHandler
from kvarn.server.metrics import Metrics
from kvarn.server.origin import Sites
from kvarn.server.planning import Planning
from kvarn.server.request_log import RequestLog
from kvarn.server.serving import address_of, listen, serve
from kvarn.server.worker import Worker
from kvarn.snapshots import Restored
from kvarn.words import counted

KEYS = "KVARN_API_KEY"
SNAPSHOT_BYTES = 10 << 30


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Serve a model over HTTP with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models,
/v1/embeddings, /tokenize, /detokenize, /metrics (Prometheus), /health, /ready, /kvarn/cache.
A browser gets a page at / that shows the cache, the requests and a prompt box.
Programs for llama-server and Ollama find their own endpoints, too. Requests with the same API
key share prefixes. After SIGTERM or Ctrl-C, running requests may finish.""",
        """
kvarn serve model.gguf --api-key KEY
kvarn serve -c 16384 -np 16 --cache-bytes 8G --cache-type int8
curl http://127.0.0.1:8000/v1/models -H "Authorization: Bearer KEY\"""",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 selects a free one (default: %(default)s)")
    add_access_flags(parser.add_argument_group("access"))
    no_page = "answer / with the list of endpoints only; by default browsers get a page that shows the cache"
    parser.add_argument("--no-page", action="store_true", help=no_page)
    parser.add_argument("--alias", metavar="NAME", help="the model's name in answers (default: as given)")
    strict = "refuse requests for a model of another name (default: this model answers them)"
    parser.add_argument("--strict-model", action="store_true", help=strict)
    for name, kind, default, what in (
        ("--max-waiting --queue", int, 256, "maximum requests that wait; further ones get status 429"),
        ("--chunk-while-decoding --chunk", int, 128, "maximum prompt tokens in a step that also decodes"),
        ("--drain-seconds", float, 30, "seconds that running requests may continue after SIGTERM or Ctrl-C"),
        (
            "--reader-seconds",
            float,
            READER_SECONDS,
            "cancel a request if its client reads nothing for N seconds",
        ),
    ):
        help = f"{what} (default: %(default)s)"
        parser.add_argument(*name.split(), type=kind, metavar="N", default=default, help=help)
    add_snapshot_flags(parser.add_argument_group("snapshots"))
    add_connection_flags(parser.add_argument_group("connections"))
    add_log_flags(parser.add_argument_group("log"))
    parser.add_argument(
        "--metrics-prefix",
        default="kvarn",
        choices=("kvarn", "vllm"),
        help="prefix of the metrics that vLLM has, too (default: %(default)s)",
    )
    flags.add_chat_flags(parser)
    flags.add_model_flags(parser, max_seqs=8)
    parser.set_defaults(cache="paged")


def add_access_flags(group: flags.Flags) -> None:
    group.add_argument(
        "--api-key", action="append", metavar="KEY", default=[], help=f"require this API key; repeatable (or {KEYS})"
    )
    group.add_argument("--share-prefixes", action="store_true", help="share cached prefixes between API keys")
    quote = "without API keys: let explanations quote the texts of all clients to every client"
    group.add_argument("--quote-texts", action="store_true", help=quote)
    name = "answer to this host name, too; .NAME also allows all names below it, * allows all; repeatable"
    group.add_argument("--allowed-host", action="append", metavar="NAME", default=[], help=name)
    origin = "let web pages of this origin (https://NAME) use the server; * allows all; repeatable"
    group.add_argument("--cors-origin", action="append", metavar="ORIGIN", default=[], help=origin)


def add_snapshot_flags(group: flags.Flags) -> None:
    group.add_argument(
        "--snapshot", action="append", metavar="FILE", default=[], help="restore this snapshot at the start; repeatable"
    )
    folder = "let clients keep snapshots in this folder (POST /kvarn/snapshots); SIZE limits it (default: 10G)"
    group.add_argument("--snapshot-dir", type=parse_folder, metavar="DIR[:SIZE]", help=folder)


def parse_folder(text: str) -> tuple[Path, int]:
    """A folder and the most bytes in it."""
    name, colon, size = text.rpartition(":")
    if not colon or not name:
        return user_path(text), SNAPSHOT_BYTES
    return user_path(name), flags.parse_bytes(size)


def add_connection_flags(group: flags.Flags) -> None:
    most = "maximum open connections (default: 8192, or fewer if the system's limit of open files is lower)"
    group.add_argument("--max-connections", type=int, metavar="N", help=most)
    each = "maximum open connections of one address (default: 7/8 of all)"
    group.add_argument("--max-connections-per-address", type=int, metavar="N", help=each)
    head = "close a connection if the head of its request takes longer (default: %(default)s)"
    group.add_argument("--head-seconds", type=float, metavar="N", default=HEAD_SECONDS, help=head)


def add_log_flags(group: flags.Flags) -> None:
    form = "one line per request on standard error, as text or as JSON; none: only warnings (default: %(default)s)"
    group.add_argument("--log-format", choices=("text", "json", "none"), default="text", help=form)
    texts = "write prompts and answers into the log, too"
    group.add_argument("--log-texts", action="store_true", help=texts)
    polls = "also log successful requests for /health, /ready and /metrics"
    group.add_argument("--log-polls", action="store_true", help=polls)


def run(args: argparse.Namespace) -> None:
    check(args)
    log = Log(error_output(), "json" if args.log_format == "json" else "text")
    handler = LogHandler(log)
    logging.getLogger().addHandler(handler)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what matters is said by us, in one line
    try:
        serve_model(args, log)
    finally:
        logging.getLogger().removeHandler(handler)
        log.close()


def serve_model(args: argparse.Namespace, log: Log) -> None:
    keys = [*args.api_key, *filter(None, os.environ.get(KEYS, "").split(","))]
    page_key = None if keys or args.no_page or args.quote_texts else secrets.token_urlsafe(16)
    access = Access(keys, args.share_prefixes, args.quote_texts, page_key)
    kept = None if args.snapshot_dir is None else Collection(*args.snapshot_dir)
    limits = limits_for(raise_file_limit(), args.max_connections, args.max_connections_per_address, args.head_seconds)
    process = resident_bytes()  # before there is a model
    with listen(args.host, args.port, args.reader_seconds) as listening:
        sites = Sites((args.host, listening.getsockname()[0]), args.allowed_host, args.cors_origin, bool(keys))
        llm = flags.load(
            args, args.trust_messages, max_waiting=args.max_waiting, chunk_while_decoding=args.chunk_while_decoding
        )
        restored = [llm.snapshots.load(user_path(each), access.salts) for each in args.snapshot]
        name = args.alias or Path(args.model).name or args.model
        metrics = Metrics(llm.engine, name, args.metrics_prefix)
        requests = RequestLog(None if args.log_format == "none" else log, args.log_texts, args.log_polls)
        service = Service(
            llm,
            name,
            access,
            metrics,
            Worker(llm, metrics),
            args.reader_seconds,
            sites=sites,
            log=requests,
            strict_model=args.strict_model,
            page=not args.no_page,
            planning=Planning(llm, process, args.host_cache),
            kept=kept,
        )

        def started() -> None:
            address = address_of(listening)
            page = None if args.no_page else page_words(address, len(keys), page_key)
            rows = summary(llm, name, address, len(keys), page, restored)
            if args.log_format == "json":
                log.say("started", f"serving {name} at {rows['address']}", **rows)
            else:
                log.plain("\n".join(f"{key:<8} {value}" for key, value in rows.items()))

        serve(service, listening, limits, args.drain_seconds, started, end_line)


def error_output() -> int:
    """The descriptor of standard error, also where another object stands in for it."""
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError):
        return 2


def check(args: argparse.Namespace) -> None:
    if args.alias is not None and not args.alias.strip():
        raise KvarnError("--alias is empty: give the name that answers should have, or leave it out")
    if not 0 <= args.port <= 65535:
        raise KvarnError(f"--port is {args.port}; it must be between 0 (a free one) and 65535")
    flags.at_least(1, max_waiting=args.max_waiting, chunk_while_decoding=args.chunk_while_decoding)
    flags.at_least(1, reader_seconds=args.reader_seconds)
    flags.at_least(1, max_connections=args.max_connections)
    flags.at_least(1, max_connections_per_address=args.max_connections_per_address)
    flags.at_least(0.1, head_seconds=args.head_seconds)
    flags.at_least(0, drain_seconds=args.drain_seconds)
    if not args.drain_seconds < 1e9:
        raise KvarnError(f"--drain-seconds is {args.drain_seconds}; give a number of seconds")
    if args.max_batch_tokens <= args.max_seqs:
        would = f"{counted(args.max_seqs, 'sequence')} would fill a step of {counted(args.max_batch_tokens, 'token')}"
        raise KvarnError(f"{would} and prompts would never start: raise -b above -np")


def page_words(address: str, n_keys: int, key: str | None) -> str:
    """Where a browser finds the page. The key is in the fragment, which browsers do not send."""
    place = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    if key is not None:
        return f"{place}/#key={key}"
    return f"{place}/ (asks for an API key)" if n_keys else f"{place}/"


def summary(
    llm: LLM, name: str, address: str, n_keys: int, page: str | None = None, restored: Sequence[Restored] = ()
) -> dict[str, str]:
    plan, config = llm.cache.plan, llm.cache.plan.groups[0].config
    whole = [g.config for g in plan.groups if g.config.spec.window is None] or [config]  # those that keep all
    held = min(each.n_blocks * each.block_size for each in whole)
    kind = f"{plan.strategy.name}, {plan.layout.name}, {plan.codec.name}, blocks of {config.block_size}"
    tiers = llm.engine.tiers.words()
    workspace = f"workspace {human_bytes(llm.program.workspace)} before the first step"
    warm = "; ".join(f"{counted(len(r.tokens), 'token')} of {r.name} in {r.seconds:.2f} s" for r in restored)
    return {
        "model": f"{printable(name)} ({llm.config.name}), weights {human_bytes(llm.program.nbytes)}, {workspace}",
        "backend": backend_words(llm.opened.facts),
        "cache": f"{kind}; {human_bytes(plan.nbytes)} hold {counted(held, 'token')}",
        **({"tiers": tiers} if tiers else {}),
        **({"restored": warm} if warm else {}),
        "serving": f"{counted(plan.max_seqs, 'sequence')} at once, {counted(config.context, 'token')} each at most",
        "keys": counted(n_keys, "API key") if n_keys else "none: anybody who reaches this address may ask",
        **({} if page is None else {"page": page}),
        "address": f"{address}/v1",
    }
