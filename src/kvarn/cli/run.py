"""`kvarn run`: continue a prompt and print each part as soon as it is computed.

Ctrl-C stops the answer; what was computed so far is summed up as usual. On a terminal, a model without a
prompt opens the chat instead.
"""

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from kvarn.chats.answer import content_of
from kvarn.cli import flags, prefill, trace
from kvarn.cli.chat import NO_TERMINAL
from kvarn.cli.ending import ending, snapshot_facts, summary
from kvarn.cli.interrupt import Interrupted
from kvarn.cli.manual import add_json_flag, describe
from kvarn.cli.parser import UsageError
from kvarn.cli.prompt import RULE, add_prompt_flags, as_prompt, choose_model_and_prompt, is_fed, read_prompt
from kvarn.cli.safe_text import safe
from kvarn.cli.table import print_json
from kvarn.cli.thinking import Thinking, dim
from kvarn.dialect import Reasoning
from kvarn.engine.params import UNBOUNDED, SamplingParams
from kvarn.errors import printable
from kvarn.llm import LLM, Job
from kvarn.loading.paths import user_path

if TYPE_CHECKING:
    from kvarn.cli.cache_map import MappedText

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
DEFAULT_LIMIT = 128  # tokens of a continued text; an answer in a conversation has no limit


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Continue a prompt. The text is printed as it is computed. Then a summary is printed to standard
error. The same seed and flags give the same text on every machine with the same KVARN_SUM_ORDER.""",
        """
kvarn run "The quick brown fox" -n 32
kvarn run smollm2 "Name three rivers." --chat --temperature 0.7 --seed 1
kvarn run model.gguf -f prompt.txt --cache paged --json
cat notes.txt | kvarn run "Summarize this text." --system "Be brief.\"""",
        usage="[MODEL] [PROMPT] [OPTIONS]",
    )
    words = parser.add_argument_group("prompt", RULE)
    flags.add_model_flags(parser)
    add_prompt_flags(parser, words)
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("-sys", "--system", metavar="TEXT", help="the system message; implies --chat")
    flags.add_chat_flags(parser)
    flags.add_snapshot_flag(parser)
    keep = "keep the text and its answer as a snapshot; run --snapshot FILE without a prompt goes on with it"
    parser.add_argument("--save-snapshot", metavar="FILE", help=keep)
    parser.add_argument("--echo", action="store_true", help="print the prompt before the answer")
    parser.add_argument("--trace", metavar="FILE", help="write a trace of steps and operations, for Perfetto")
    flags.add_map_flag(parser)
    add_json_flag(parser)
    unset = "the model's own with --chat; without it, temperature 0 and no filter"
    flags.add_sampling_flags(parser, f"{DEFAULT_LIMIT}; with --chat -1", unset)
    top = "with --json: the log-probability of each token and of the N most likely ones"
    parser.add_argument("--logprobs", type=int, metavar="N", help=top)
    parser.set_defaults(settle=settle)


def settle(args: argparse.Namespace) -> None:
    """What follows from the options together."""
    given = args.model is not None or args.model_word is not None
    choose_model_and_prompt(args)
    args.chat = args.chat or args.system is not None
    if given and opens_chat(args):
        args.command, args.plain, args.no_history, args.chat, args.session = "chat", False, False, True, None
    if args.max_tokens is None:
        args.max_tokens = -1 if args.chat else DEFAULT_LIMIT


def opens_chat(args: argparse.Namespace) -> bool:
    """Whether there is no prompt, nor an option that needs one, and a person is at the terminal."""
    needs_prompt = args.json or args.echo or args.trace is not None or args.logprobs is not None
    needs_prompt = needs_prompt or args.snapshot is not None or args.save_snapshot is not None
    asked = args.prompt is not None or args.file is not None
    return not asked and not needs_prompt and sys.stdin.isatty() and sys.stdout.isatty()


def run(args: argparse.Namespace) -> None:
    if args.echo and args.chat:
        raise UsageError("--echo prints a text and its continuation: leave it out with --chat")
    if args.map and args.json:
        raise UsageError("--map draws on a terminal: leave it out with --json")
    if args.logprobs is not None and not args.json:
        raise UsageError("--logprobs needs --json")
    if args.guessed and sys.stderr.isatty():
        note = f"continuing {printable(args.guessed, 40)!r} with {args.model} (as an option: {as_prompt(args.guessed)})"
        print(note if os.environ.get("TERM", "dumb") == "dumb" else dim(note), file=sys.stderr)
    goes_on = args.snapshot is not None and args.prompt is None and args.file is None and not is_fed()
    prompt, params = "" if goes_on else read_prompt(args), flags.sampling_params(args)
    began = time.perf_counter()
    llm = flags.load(args, args.trust_messages)
    load_seconds = time.perf_counter() - began
    if args.trace:
        llm.program.trace(True)
        trace.save(args.trace, [])  # fails before the model runs if the file cannot be written
    job = go_on(llm, args) if goes_on else start(llm, args, prompt, params)
    echoed = prompt if args.echo else ""
    complete = answer(llm, job, not args.json, echoed, args.map)
    if args.trace:
        trace.save(args.trace, llm.program.timings())
    if args.save_snapshot is not None:
        llm.save_snapshot(args.save_snapshot, job.output())
    if args.json:
        print_json(report(llm, job, load_seconds, echoed))
    else:
        print(f"[{summary(job)}; {ending(llm, job)}]", file=sys.stderr)
    if not complete:
        raise Interrupted


def go_on(llm: LLM, args: argparse.Namespace) -> Job:
    """The answer in the snapshot, with its own settings except those that were given."""
    given = {name: value for name in SETTINGS if (value := getattr(args, name)) is not None}
    return llm.snapshots.continued(user_path(args.snapshot), {**given, "max_tokens": limit(args)})


def limit(args: argparse.Namespace) -> int:
    return UNBOUNDED if args.max_tokens == -1 else int(args.max_tokens)


def start(llm: LLM, args: argparse.Namespace, prompt: str, params: SamplingParams) -> Job:
    if args.snapshot is not None:
        llm.load_snapshot(args.snapshot)
    if not args.chat:
        return llm.start(prompt, params)
    system = [{"role": "system", "content": args.system}] if args.system else []
    (question,) = llm.questions([[*system, {"role": "user", "content": prompt}]], params, {})
    return llm.start_question(question)


def answer(llm: LLM, job: Job, shown: bool, echoed: str, mapped: bool = False) -> bool:
    """Compute the answer and print it after the echoed prompt, if it is to be shown. False after Ctrl-C."""
    output = output_of(llm, job, mapped)
    complete, text, thinking = True, echoed, Thinking(output.add)
    printed = safe if sys.stdout.isatty() else str  # a model's text must not control the terminal
    thinks = shown and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    try:
        for part in prefill.stream(llm, job, output.wait):
            if isinstance(part, Reasoning):
                if thinks:
                    thinking.add(part.text)
                continue
            text += content_of(part)
            if shown:  # the echo comes with the first piece: until then the line shows the progress of the prompt
                thinking.end()
                output.add(printed(text))
            text = ""
    except KeyboardInterrupt:
        llm.runner.cancel(job)
        complete = False
    if shown:
        thought = thinking.end(last=True)
        output.add(printed(text))
        output.end(thought)
    return complete


class PlainText:
    def add(self, text: str) -> None:
        print(text, end="", flush=True)

    def wait(self) -> None:
        """The prompt is being read."""

    def end(self, thought: bool) -> None:
        """`thought`: the answer is reasoning only, which ends its line."""
        if not thought:
            print(flush=True)


def output_of(llm: LLM, job: Job, mapped: bool) -> "MappedText | PlainText":
    if not mapped:
        return PlainText()
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        print(NO_TERMINAL, file=sys.stderr)
        return PlainText()
    from kvarn.cli.cache_map import MappedText, below  # takes longer to load than most commands take to run

    return MappedText(below(llm, job))


def rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds else 0.0


def report(llm: LLM, job: Job, load_seconds: float, echoed: str = "") -> dict[str, object]:
    output, stats, cache, counters = job.output(), llm.engine.stats, llm.cache, llm.memory.counters
    completion = output.completions[0]
    logprobs = [
        {"token": each.token, "logprob": each.logprob, "top": [{"token": t, "logprob": p} for t, p in each.top]}
        for each in completion.logprobs
    ]
    return {
        "text": echoed + output.text,
        **({"reasoning": output.reasoning} if output.reasoning else {}),
        "tokens": output.tokens,
        "prompt_tokens": output.prompt_tokens,
        "cached_tokens": output.cached_tokens,
        **snapshot_facts(job),
        "finish_reason": output.finish_reason,
        "limit": completion.limit,
        **({"logprobs": logprobs} if logprobs else {}),
        "timings": {
            "load_ms": 1000 * load_seconds,
            "prefill_ms": 1000 * stats.prefill_seconds,
            "prefill_tok_s": rate(stats.prefill_tokens, stats.prefill_seconds),
            "decode_tok_s": rate(stats.decode_tokens, stats.decode_seconds),
        },
        "cache": {
            "strategy": cache.plan.strategy.name,
            "layout": cache.plan.layout.name,
            "codec": cache.plan.codec.name,
            "bytes": cache.plan.nbytes,
            "blocks_used": stats.peak_blocks,
            "bytes_written": counters.written,
            "bytes_read": counters.read,
            "bytes_copied": counters.copied,
        },
        "backend": llm.opened.facts,
        "kernels": dict(counters.calls),
    }
