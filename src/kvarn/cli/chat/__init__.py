"""`kvarn chat`: a conversation in the terminal. It stays in the cache, so each turn computes only the new tokens.

With a terminal on both sides there are line editing, history and Markdown; what they need is imported only then.
Otherwise lines come in and plain text goes out (plain.py). docs/chat.md describes what a user sees.
"""

import argparse
import os
import sys
from functools import partial

from kvarn.cli import flags
from kvarn.cli.chat.conversation import ID, Conversation
from kvarn.cli.chat.plain import LineReader, PlainScreen
from kvarn.cli.chat.session import Session
from kvarn.cli.chat.session_file import NoSession, SessionFile, open_session
from kvarn.cli.interrupt import Failed
from kvarn.cli.manual import describe
from kvarn.cli.table import human_bytes
from kvarn.errors import printable
from kvarn.jobs.turn import Uninterrupted
from kvarn.llm import LLM
from kvarn.loading.paths import user_path

NO_TERMINAL = "--map draws on a terminal: there is none here, so it is left out"
HINT = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves"


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Hold a conversation in the terminal. The conversation stays in the cache, so each turn computes
only the new tokens. When the context is full, the oldest turns are left out of the prompt. Ctrl-C
stops an answer. Ctrl-D or /quit ends the program. /help lists the commands. Without a terminal,
each line of standard input is a message, and the answers are plain text.""",
        """
kvarn chat
kvarn chat --session notes.kvs
kvarn chat -m model.gguf -c 0 --system "Answer in one sentence." --temp 0.7
echo "Name three rivers." | kvarn chat""",
    )
    parser.add_argument("-sys", "--system", metavar="TEXT", help="the system message")
    lasts = "keep the conversation in this file at the end, and go on with it the next time"
    parser.add_argument("--session", metavar="FILE", help=lasts)
    flags.add_snapshot_flag(parser)
    parser.add_argument("--plain", "--no-markdown", action="store_true", help="show answers as they are, not Markdown")
    parser.add_argument("--no-history", action="store_true", help="do not keep what is typed for later runs")
    flags.add_map_flag(parser)
    flags.add_chat_flags(parser)
    flags.add_model_flags(parser)
    flags.add_sampling_flags(parser, "-1")
    parser.set_defaults(max_tokens=-1)


def run(args: argparse.Namespace) -> None:
    params = flags.sampling_params(args)
    llm = flags.load(args, args.trust_messages)
    llm.template  # noqa: B018 (a model without a template is refused before the first question)
    if params.structure is not None:
        llm.runner.compiler.compile(params.structure)  # a bad one is refused before the first question, too
    conversation = Conversation(llm, params, args.system)
    if args.snapshot is not None:
        llm.snapshots.load(user_path(args.snapshot), conversation=ID)
    lasting = open_session(args.session)
    found = lasting.resume(conversation, params)
    if is_terminal():
        run_in_terminal(args, conversation, lasting, found)
    else:
        if args.map:
            print(NO_TERMINAL, file=sys.stderr)
        screen = PlainScreen()
        session = Session(conversation, LineReader(), screen)
        hold(session, lasting, found)
        if session.failed and not sys.stdin.isatty():
            raise Failed


def hold(session: Session, lasting: SessionFile | NoSession, found: str) -> None:
    """The conversation, between reading and keeping its file."""
    if found:
        session.screen.note(found)
    try:
        session.loop()
    finally:
        with Uninterrupted():  # a further Ctrl-C must not lose what was said
            kept = lasting.keep(session.conversation)
    if kept:
        session.screen.note(kept)


def run_in_terminal(
    args: argparse.Namespace, conversation: Conversation, lasting: SessionFile | NoSession, found: str
) -> None:
    # Imported here, because these modules take longer to load than most commands take to run.
    from kvarn.cli.cache_map import below
    from kvarn.cli.chat.keyboard import TerminalKeyboard
    from kvarn.cli.chat.screen import TerminalScreen
    from kvarn.cli.chat.terminal import ChatMode

    screen = TerminalScreen(not args.plain, partial(below, conversation.llm) if args.map else None)
    with ChatMode():
        keyboard = TerminalKeyboard(screen.note, keep_history=not args.no_history)
        screen.greet(args.model, greeting(conversation.llm))
        hold(Session(conversation, keyboard, screen), lasting, found)


def is_terminal() -> bool:
    """Whether a person types here, and the terminal can move its cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


def greeting(llm: LLM) -> list[str]:
    plan = llm.cache.plan
    cache = f"cache {plan.strategy.name} {plan.codec.name}, {human_bytes(plan.nbytes)}"
    return [f"{printable(llm.config.name)}; context {plan.context} tokens; {cache}", HINT]
