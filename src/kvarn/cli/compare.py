"""`kvarn compare`: what cache strategies, number types and windows cost and change, on the user's model and text.

The work is in kvarn.comparison; compare_output.py prints the result.
"""

import argparse
from pathlib import Path

from kvarn.backends.cache_settings import context_of
from kvarn.bench.subject import Setup
from kvarn.cache.codec import CODECS, cache_types
from kvarn.cache.strategy import NAMES
from kvarn.cli import flags
from kvarn.cli.bench import numbers
from kvarn.cli.compare_output import Facts, show, to_json
from kvarn.cli.manual import add_json_flag, describe
from kvarn.cli.parser import UsageError
from kvarn.cli.progress import ProgressLine
from kvarn.cli.table import print_json
from kvarn.comparison import candidate
from kvarn.comparison.lockstep import lockstep
from kvarn.comparison.plot import plot
from kvarn.comparison.report import Report, report
from kvarn.comparison.speed import GENERATED, cases, speeds
from kvarn.engine.scoring import windows
from kvarn.errors import KvarnError
from kvarn.llm import LLM
from kvarn.words import counted

MOST = 64  # caches
WINDOW = 2048  # tokens


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Compare cache strategies, number types and windows on your model and your text. All combinations read
the same tokens in lockstep and are compared with a contiguous cache of f32 cells. The result has
llama.cpp's statistics (`llama-perplexity --kl-divergence`) by depth, the first greedy token that
differs, memory, and speed at several depths.""",
        """
kvarn compare -f notes.txt
kvarn compare model.gguf -f wiki.test.raw --cache-type bf16,int8 -c 8192 --windows 2
kvarn compare -f notes.txt --cache paged,sinks,sliding --window 512,1024 --plot compare.svg""",
    )
    parser.add_argument("-f", "--file", metavar="FILE", help="the text, in UTF-8; - reads standard input")
    cut = "read the first N windows of the text (default: %(default)s)"
    parser.add_argument("--windows", type=int, metavar="N", default=4, help=cut)
    parser.add_argument("--plot", metavar="FILE.svg", help="draw memory against KLD, and speed against depth")
    parser.add_argument("--details", action="store_true", help="print all percentiles, too")
    add_json_flag(parser)
    group = parser.add_argument_group("model")
    flags.add_model_flag(parser, group)
    length = f"tokens of a window of text; 0: the context that the model was trained for (default: up to {WINDOW})"
    group.add_argument("-c", "--context", "--ctx-size", type=int, metavar="N", help=length)
    step = "maximum tokens computed in one step (default: %(default)s)"
    group.add_argument("-b", "--max-batch-tokens", "--batch-size", type=int, metavar="N", default=512, help=step)
    flags.add_compute_flags(group)
    add_cache_flags(parser)
    group = parser.add_argument_group("speed")
    many = f"tokens to generate for speed and the first token that differs; 0: none (default: at most {GENERATED})"
    group.add_argument("-n", "--n-gen", type=int, metavar="N", help=many)
    where = "generate after so many tokens of the text (default: none, half a window, almost a window)"
    group.add_argument("-d", "--n-depth", metavar="N,..", help=where)
    times = "measure N times and report the median (default: %(default)s)"
    group.add_argument("-r", "--repetitions", type=int, metavar="N", default=3, help=times)


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cache", "Every combination is compared.")
    strategies = f"cache strategies: {', '.join(NAMES)} (default: paged)"
    group.add_argument("--cache", type=flags.Names(NAMES), default="paged", metavar="A,..", help=strategies)
    cells = f"number types of stored keys and values: {', '.join(CODECS)}, or K/V (default: all)"
    group.add_argument(
        "--cache-type", type=flags.Names(cache_types()), default=",".join(CODECS), metavar="X,..", help=cells
    )
    sizes = "windows of ring, sliding and sinks (default: the window of text, which leaves nothing out)"
    group.add_argument("--window", metavar="N,..", help=sizes)
    group.add_argument("--pinned", type=int, metavar="N", help="pinned tokens of sinks (default: 4)")


def run(args: argparse.Namespace) -> None:
    if args.file is None:
        raise UsageError("give the text with -f FILE")
    flags.at_least(1, windows=args.windows, max_batch_tokens=args.max_batch_tokens, repetitions=args.repetitions)
    flags.at_least(0, context=args.context, pinned=args.pinned, n_gen=args.n_gen)
    sizes = [] if args.window is None else numbers(args.window, "--window", 1)
    depths = None if args.n_depth is None else numbers(args.n_depth, "-d", 0)
    wanted = candidate.setups(args.cache, args.cache_type, sizes, args.pinned, args.max_batch_tokens)
    if len(wanted) > MOST:
        raise KvarnError(f"these are {counted(len(wanted), 'cache')}, and {MOST} is the most: compare fewer at a time")
    check_plot(args.plot)
    text = flags.read_text(args.file)
    with ProgressLine() as line:
        facts, result = compare(args, wanted, depths, text, line)
    if args.plot is not None:
        Path(args.plot).write_text(plot(result, *facts.headline), encoding="utf-8")
    if args.json:
        print_json(to_json(facts, result))
    else:
        show(facts, result, args.details)
        if args.plot is not None:
            print(f"\nplot: {args.plot}")


def compare(
    args: argparse.Namespace,
    wanted: list[Setup],
    depths: list[int] | None,
    text: str,
    line: ProgressLine,
) -> tuple[Facts, Report]:
    llm = LLM(  # its own cache is not used: each candidate brings one
        args.model,
        cache="contiguous",
        cache_type=flags.rarest([candidate.BASE.cache_type, *args.cache_type]),
        context=args.context,
        max_seqs=1,
        max_batch_tokens=args.max_batch_tokens,
        threads=args.threads,
        backend=args.backend,
        progress=line,
    )
    size = min(llm.config.context, WINDOW) if args.context is None else context_of(llm.config, args.context)
    tokens = llm.tokenizer.encode(text)
    cut = windows(tokens, size, args.windows, llm.tokenizer.bos_id if llm.tokenizer.add_bos else None)
    chosen = cases(depths, args.n_gen, size)
    candidates = candidate.allocate(llm, wanted, size)
    positions = lockstep(llm.program, candidates, cut, min(args.max_batch_tokens, size), line)
    found = speeds(llm, candidates, tokens, chosen, args.repetitions, line)
    model = Path(args.model).name if Path(args.model).exists() else args.model
    name = "standard input" if args.file == "-" else Path(args.file).name
    return Facts(model, name, size, len(cut), positions, llm.opened.facts), report(candidates, positions, size, found)


def check_plot(path: str | None) -> None:
    """Refuse a file that cannot be written before the work begins, not after it."""
    if path is None:
        return
    if not path.lower().endswith(".svg"):
        raise UsageError(f"--plot {path}: the picture is in SVG, so the name must end in .svg")
    try:
        with Path(path).open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise KvarnError(f"{path}: {error.strerror}") from None
