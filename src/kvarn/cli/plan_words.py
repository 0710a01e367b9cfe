"""A forecast in words, for `kvarn plan`: one line for each part of memory, a table of speeds, what would fit."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvarn.cli.table import human_bytes, print_table
from kvarn.errors import printable
from kvarn.words import counted

Facts = Mapping[str, Any]
WIDTH = 10  # of the first column
MOST_KINDS = 4  # types of weights that are named


def show(facts: Facts) -> None:
    line("model", f"{printable(facts['model'])}: {facts['architecture']}, {counted(facts['layers'], 'layer')}")
    if "device" in facts:
        show_device(facts)
        return
    line("machine", machine_words(facts))
    print()
    show_memory(facts)
    print()
    show_speed(facts)
    print()
    prompt, batch = facts["prompt"], facts["batch"]
    line("prompt", f"{rate(prompt['tok_s'])} tokens/s for {counted(prompt['tokens'], 'token')}")
    if batch["sequences"] > 1:
        n = counted(batch["sequences"], "sequence")
        line("batch", f"{rate(batch['tok_s'])} tokens/s of {n} together, each with half a context")
    show_options(facts)
    if "check" in facts:
        print()
        show_check(facts["check"])


def line(name: str, text: str) -> None:
    print(f"{name:<{WIDTH}} {text}".rstrip())


def machine_words(facts: Facts) -> str:
    threads = counted(facts["threads"], "thread")
    return f"{printable(facts['cpu'])}, {facts['backend']['isa']}, {threads}, reads {facts['read_gb_s']:.1f} GB/s"


def show_memory(facts: Facts) -> None:
    memory, cache = facts["memory"], facts["cache"]
    kinds = sorted(memory["kinds"].items(), key=lambda each: -each[1])
    more = f" and {len(kinds) - MOST_KINDS} more" if len(kinds) > MOST_KINDS else ""
    tokens = f"{cache['sequences']} x {counted(cache['context'], 'token')}"
    cells = f"{cache['strategy']}, {cache['codec']}, {human_bytes(cache['bytes_per_token'])} a token"
    beside = {"Python": "process", "vocabulary": "vocabulary", "blocks": "bookkeeping", "pages": "pages"}
    rows = [
        ("weights", memory["weights"], in_mib(kinds[:MOST_KINDS]) + more),
        ("cache", memory["cache"], f"{tokens}, {cells}"),
        ("workspace", memory["workspace"], f"steps of {counted(facts['step_tokens'], 'token')}"),
        ("process", sum(memory[key] for key in beside.values()), in_mib((k, memory[v]) for k, v in beside.items())),
        ("total", memory["total"], verdict(facts)),
    ]
    if memory["evicted"]:
        rows.insert(2, ("evicted", memory["evicted"], "host memory for blocks that the cache evicts"))
    for name, nbytes, words in rows:
        line(name, f"{human_bytes(nbytes):>10}  {words}")


def in_mib(parts: Iterable[tuple[str, int]]) -> str:
    """Those that are not less than half a MiB."""
    shown = [f"{name} {nbytes / 2**20:,.0f}" for name, nbytes in parts if nbytes >= 1 << 19]
    return f"{', '.join(shown)} MiB" if shown else ""


def show_device(facts: Facts) -> None:
    sizes, cache = facts["device"], facts["cache"]
    line("device", printable(facts["backend"]["device"]))
    print()
    cells = f"{cache['strategy']}, {cache['codec']}, {human_bytes(cache['bytes_per_token'])} a token"
    longest = f"{cache['sequences']} at once, {counted(cache['longest'], 'token')} at most"
    for name, words in (("weights", ""), ("cache", f"{cells}; {longest}"), ("beside", "context, workspace, margin")):
        line(name, f"{human_bytes(sizes[name]):>10}  {words}")
    line("total", f"{human_bytes(sizes['total']):>10}  {verdict(facts)}")
    print()
    if "depths" not in facts:
        line("speed", "is measured on the device itself, if it has room for the model")
        return
    rows = [(f"{e['depth']:,}", rate(e["tok_s"]), seconds(e["first_token_seconds"])) for e in facts["depths"]]
    print_table(("depth", "tokens/s", "first token"), rows, left=0)
    print()
    line("prompt", f"{rate(facts['prompt']['tok_s'])} tokens/s for {counted(facts['prompt']['tokens'], 'token')}")
    if "check" in facts:
        print()
        show_check(facts["check"])


def verdict(facts: Facts) -> str:
    if facts["budget"] is None:
        return "how much is free is not known here"
    whose = "given" if facts["budget_given"] else "free here"
    return f"of {human_bytes(facts['budget'])} {whose}: {'fits' if facts['fits'] else 'DOES NOT FIT'}"


def show_speed(facts: Facts) -> None:
    rows = [
        (
            f"{each['depth']:,}",
            rate(each["tok_s"]),
            rate(each["limit_tok_s"]),
            f"{each['bytes_per_token'] / 1e6:,.0f}",
            seconds(each["first_token_seconds"]),
        )
        for each in facts["depths"]
    ]
    print_table(("depth", "tokens/s", "limit", "MB/token", "first token"), rows, left=0)


def show_options(facts: Facts) -> None:
    options = facts["would_fit"]
    if options:
        for n, each in enumerate(options):
            words = f"{' '.join(each['flags'])}  ({human_bytes(each['bytes'])})"
            line("would fit" if not n else "", words)
    elif facts["fits"] is False:
        line("would fit", "nothing with these weights: take a smaller model, or one with fewer bits")


def show_check(check: Facts) -> None:
    rows: list[Sequence[str]] = []
    for name in ("memory", "weight"):
        sizes = check.get(f"{name}_bytes")
        if sizes is not None:
            rows.append(check_row(name, sizes, lambda n: f"{n / 2**20:,.1f} MiB"))
    for each in check["depths"]:
        rows.append(check_row(f"tokens/s at {each['depth']:,}", each["tok_s"], rate))
        name = f"first token of {each['prompt_tokens']:,}"
        rows.append(check_row(name, each["first_token_seconds"], seconds))
    print_table(("", "forecast", "truth", "error"), rows)


def check_row(name: str, pair: Facts, words: Any) -> tuple[str, ...]:
    return name, words(pair["forecast"]), words(pair["truth"]), f"{100 * pair['error_share']:+.1f} %"


def rate(number: float) -> str:
    return f"{number:,.1f}" if number < 1000 else f"{number:,.0f}"


def seconds(number: float) -> str:
    return f"{1000 * number:.0f} ms" if number < 1 else f"{number:,.1f} s"
