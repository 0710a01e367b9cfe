"""`kvarn chat`: a conversation. It stays in the cache, so each turn computes only the new tokens.

Ctrl-C stops an answer; Ctrl-D or /exit ends the program.
"""

import argparse
import sys
from functools import partial
from io import TextIOWrapper

from kvarn.cli import flags
from kvarn.cli.manual import describe
from kvarn.cli.run import summary
from kvarn.engine.explain import explain, in_words
from kvarn.engine.request import SamplingParams
from kvarn.errors import KvarnError
from kvarn.llm import LLM

CONVERSATION = "chat"  # there is one
HELP = """/help     this text
/clear    forget the conversation
/stats    what the last answer reused, why not more, and what it cost
/exit     leave (or Ctrl-D)"""


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Hold a conversation in the terminal. The conversation stays in the cache, so each turn computes
only the new tokens. /stats shows what was reused. Ctrl-C stops an answer. Ctrl-D or /exit ends the
program.""",
        """
kvarn chat
kvarn chat -m model.gguf -c 0 --system "Answer in one sentence." --temp 0.7""",
    )
    parser.add_argument("-sys", "--system", metavar="TEXT", help="the system message")
    flags.add_chat_flags(parser)
    flags.add_model_flags(parser)
    flags.add_sampling_flags(parser)
    parser.set_defaults(max_tokens=512)


def run(args: argparse.Namespace) -> None:
    params = flags.sampling_params(args)
    llm = flags.load(args, args.trust_messages)
    llm.template  # noqa: B018 - a model without a template is refused before the first question
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    Conversation(llm, params, args.system).loop()


class Conversation:
    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self.llm = llm
        self.params = params
        self.start = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.start)
        self.last = "nothing has been said yet"

    def loop(self) -> None:
        if sys.stdin.isatty():
            print(f"{self.llm.config.name}; /help for help", file=sys.stderr)
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print()
                continue
            if line == "/exit":
                return
            if line.startswith("/"):
                self.command(line)
            elif line:
                self.turn(line)

    def command(self, line: str) -> None:
        if line == "/help":
            print(HELP)
        elif line == "/clear":
            self.messages = list(self.start)
            self.llm.runner.forget(CONVERSATION)
        elif line == "/stats":
            print(self.last)
        else:
            print(f"{line}: there is no such command; /help lists them")

    def turn(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        try:
            job = self.llm.start(self.llm.render(self.messages), self.params, conversation=CONVERSATION)
        except KvarnError as error:
            self.messages.pop()
            print(f"{error} (/clear forgets the conversation)")
            return
        try:
            for piece in self.llm.stream_job(job):
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            self.llm.runner.cancel(job)
        print()
        spell = partial(self.llm.tokenizer.decode, special=True)
        cost = summary(job, self.llm.engine.stats, self.llm.cache.plan.context)
        self.last = f"{in_words(explain(job.request), spell)}\n{cost}"
        self.messages.append({"role": "assistant", "content": job.output().text})
