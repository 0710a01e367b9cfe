"""`kvarn run`: continue a prompt and print each part as soon as it is computed.

Ctrl-C stops the answer; what was computed so far is summed up as usual.
"""

import argparse
import sys
import time

from kvarn.cli import flags, prefill, trace
from kvarn.cli.interrupt import Interrupted
from kvarn.cli.manual import add_json_flag, describe
from kvarn.cli.parser import UsageError
from kvarn.cli.prompt import RULE, add_prompt_flags, read_prompt
from kvarn.cli.safe_text import safe
from kvarn.cli.table import print_json
from kvarn.engine.explain import explain
from kvarn.engine.stats import EngineStats
from kvarn.llm import LLM, Completion, Job
from kvarn.words import counted


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
kvarn run model.gguf < prompt.txt""",
        usage="[MODEL] [PROMPT] [OPTIONS]",
    )
    words = parser.add_argument_group("prompt", RULE)
    flags.add_model_flags(parser)
    add_prompt_flags(parser, words)
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    flags.add_chat_flags(parser)
    parser.add_argument("--echo", action="store_true", help="print the prompt before the answer")
    parser.add_argument("--trace", metavar="FILE", help="write a trace of steps and operations, for Perfetto")
    add_json_flag(parser)
    flags.add_sampling_flags(parser, "the model's own with --chat; without it, temperature 0 and no filter")
    top = "with --json: the log-probability of each token and of the N most likely ones"
    parser.add_argument("--logprobs", type=int, metavar="N", help=top)


def run(args: argparse.Namespace) -> None:
    if args.echo and args.chat:
        raise UsageError("--echo prints a text and its continuation: leave it out with --chat")
    if args.logprobs is not None and not args.json:
        raise UsageError("--logprobs needs --json")
    prompt, params = read_prompt(args), flags.sampling_params(args)
    start = time.perf_counter()
    llm = flags.load(args, args.trust_messages)
    load_seconds = time.perf_counter() - start
    if args.trace:
        llm.program.trace(True)
        trace.save(args.trace, [])  # fails before the model runs if the file cannot be written
    job = llm.start(llm.render(prompt), llm.for_chat(params)) if args.chat else llm.start(prompt, params)
    echoed = prompt if args.echo else ""
    complete = answer(llm, job, not args.json, echoed)
    if args.trace:
        trace.save(args.trace, llm.program.timings())
    if args.json:
        print_json(report(llm, job, load_seconds, echoed))
    else:
        print(summary(job, llm.engine.stats, llm.cache.longest), file=sys.stderr)
    if not complete:
        raise Interrupted


def answer(llm: LLM, job: Job, shown: bool, echoed: str) -> bool:
    """Compute the answer and print it after the echoed prompt, if it is to be shown. False after Ctrl-C."""
    complete, text = True, echoed
    printed = safe if sys.stdout.isatty() else str  # a model's text must not control the terminal
    try:
        for piece in prefill.stream(llm, job):
            text += piece
            if shown:  # the echo comes with the first piece: until then the line shows the progress of the prompt
                print(printed(text), end="", flush=True)
            text = ""
    except KeyboardInterrupt:
        llm.runner.cancel(job)
        complete = False
    if shown:
        print(printed(text))
    return complete


def rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds else 0.0


def summary(job: Job, stats: EngineStats, context: int) -> str:
    output, work = job.output(), explain(job.request)
    reached = f", {work.computed:,} computed" if work.reached < work.prompt else ""
    speed = f", {rate(stats.decode_tokens, stats.decode_seconds):.1f} per second" if stats.decode_tokens else ""
    return (
        f"[prompt {counted(output.prompt_tokens, 'token')}, {output.cached_tokens:,} of them cached{reached}; "
        f"answer {counted(len(output.tokens), 'token')}{speed}; "
        f"{ended(output.completions[0], job.request.params.max_tokens, context)}]"
    )


def ended(completion: Completion, max_tokens: int | None, context: int) -> str:
    """Why the answer ended. A limit is named with the flag that raises it."""
    if completion.limit == "max_tokens":
        return f"max_tokens reached (-n {max_tokens})"
    if completion.limit == "context":
        return f"context full (-c {context})"
    return completion.finish_reason or "unfinished"


def report(llm: LLM, job: Job, load_seconds: float, echoed: str = "") -> dict[str, object]:
    output, stats, cache, counters = job.output(), llm.engine.stats, llm.cache, llm.memory.counters
    completion = output.completions[0]
    logprobs = [
        {"token": each.token, "logprob": each.logprob, "top": [{"token": t, "logprob": p} for t, p in each.top]}
        for each in completion.logprobs
    ]
    return {
        "text": echoed + output.text,
        "tokens": output.tokens,
        "prompt_tokens": output.prompt_tokens,
        "cached_tokens": output.cached_tokens,
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
        "backend": llm.backend.facts(),
        "kernels": dict(counters.calls),
    }
