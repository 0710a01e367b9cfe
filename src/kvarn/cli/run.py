"""`kvarn run`: continue a prompt and print each part as soon as it is computed."""

import argparse
import sys
import time

from kvarn.cli import flags, trace
from kvarn.cli.manual import add_json_flag, describe
from kvarn.cli.table import print_json
from kvarn.engine.stats import EngineStats
from kvarn.llm import LLM, Job


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Continue a prompt. The text is printed as it is computed. Then a summary is printed to standard
error. The same seed and flags give the same text on every machine with the same KVARN_SUM_ORDER.""",
        """
kvarn run -p "The quick brown fox" -n 32
kvarn run --chat -p "Name three rivers." --temp 0.7 --seed 1
kvarn run -m model.gguf -f prompt.txt --cache paged --json""",
    )
    flags.add_prompt_flags(parser)
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    flags.add_chat_flags(parser)
    parser.add_argument("--trace", metavar="FILE", help="write a trace of steps and operations, for Perfetto")
    add_json_flag(parser)
    flags.add_model_flags(parser)
    flags.add_sampling_flags(parser)


def run(args: argparse.Namespace) -> None:
    prompt, params = flags.read_prompt(args), flags.sampling_params(args)
    start = time.perf_counter()
    llm = flags.load(args, args.trust_messages)
    load_seconds = time.perf_counter() - start
    if args.trace:
        llm.program.trace(True)
        trace.save(args.trace, [])  # fails before the model runs if the file cannot be written
    job = llm.start(llm.render([{"role": "user", "content": prompt}]) if args.chat else prompt, params)
    for piece in llm.stream_job(job):
        if not args.json:
            print(piece, end="", flush=True)
    if args.trace:
        trace.save(args.trace, llm.program.timings())
    if args.json:
        print_json(report(llm, job, load_seconds))
    else:
        print()
        print(summary(job, llm.engine.stats), file=sys.stderr)


def rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds else 0.0


def summary(job: Job, stats: EngineStats) -> str:
    output = job.output()
    return (
        f"[prompt {output.prompt_tokens} tokens, {output.cached_tokens} of them cached; "
        f"answer {len(output.tokens)} tokens, {rate(stats.decode_tokens, stats.decode_seconds):.1f} per second; "
        f"{output.finish_reason}]"
    )


def report(llm: LLM, job: Job, load_seconds: float) -> dict[str, object]:
    output, stats, cache, counters = job.output(), llm.engine.stats, llm.cache, llm.memory.counters
    return {
        "text": output.text,
        "tokens": output.tokens,
        "prompt_tokens": output.prompt_tokens,
        "cached_tokens": output.cached_tokens,
        "finish_reason": output.finish_reason,
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
