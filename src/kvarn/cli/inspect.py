"""`kvarn inspect`: what is in a model file, and how much memory its keys and values need."""

import argparse
from typing import Any

from kvarn.backends import AUTO
from kvarn.backends.cache_settings import context_of
from kvarn.backends.choice import Opening
from kvarn.backends.cpu.program import packed_size
from kvarn.backends.cuda.limits import stored_as, tensor_bytes, weight_bytes
from kvarn.cache.codec import CODECS
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.strategy import STRATEGIES
from kvarn.cli import flags
from kvarn.cli.manual import add_json_flag, describe
from kvarn.cli.progress import ProgressLine
from kvarn.cli.table import human_bytes, print_json, print_table
from kvarn.dialect import find
from kvarn.errors import KvarnError, printable
from kvarn.llm import tokenizer_of
from kvarn.loading.catalogue import DEFAULT_MODEL
from kvarn.loading.checkpoint import Checkpoint, open_checkpoint
from kvarn.loading.encodings import TensorInfo
from kvarn.loading.pull import resolve
from kvarn.server.templates import TemplateProcess


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Show a model's shape, how it writes tool calls and reasoning, the backend that would run it here,
its tensors by type with their size in the file and in memory, and the size of the cache with every
cache strategy and number type. No weights are loaded.""",
        """
kvarn inspect
kvarn inspect model.gguf -c 32768 --json""",
        usage="[MODEL] [OPTIONS]",
    )
    what = "name, .gguf file, safetensors folder or hf:org/repo (default: %(default)s)"
    parser.add_argument("model", metavar="MODEL", nargs="?", default=DEFAULT_MODEL, help=what)
    length = "context for the cache sizes; 0: the context that the model was trained for (default: up to 4096)"
    parser.add_argument("-c", "--context", "--ctx-size", type=int, metavar="N", help=length)
    parser.add_argument("--window", type=int, metavar="N", help="window of the strategies ring, sliding and sinks")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> None:
    with ProgressLine() as line:
        checkpoint = open_checkpoint(resolve(args.model, progress=line))
    facts = {"model": args.model, **collect(checkpoint, args)}
    if args.json:
        print_json(facts)
    else:
        show(facts)


def collect(checkpoint: Checkpoint, args: argparse.Namespace) -> dict[str, object]:
    config = checkpoint.config
    flags.at_least(0, context=args.context)
    flags.at_least(1, window=args.window)
    context = context_of(config, args.context)
    tensors = [tensor_row(info) for info in checkpoint.infos]
    return {
        "name": config.name,
        "architecture": config.architecture,
        "layers": config.n_layers,
        "hidden": config.hidden,
        "feed_forward": config.feed_forward,
        "heads": config.n_heads,
        "kv_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "trained_context": config.context,
        "windows": sorted({w for w in config.windows if w is not None}),
        "rope_base": config.rope.base,
        **dialect_facts(checkpoint),
        "backend": backend_facts(checkpoint, context),
        "tensors": by_type(tensors),
        "each_tensor": tensors,
        "context": context,
        "window": args.window,
        "kv_cache": [row for name in STRATEGIES for row in kv_rows(checkpoint, name, context, args.window)],
    }


def backend_facts(checkpoint: Checkpoint, context: int) -> dict[str, object]:
    """The backend that `auto` opens for this model. On a device, what its weights take there, too."""
    with ProgressLine() as line:
        opened = Opening(AUTO, 1, line).finish(CacheConfig(checkpoint.config.layer_specs, context), checkpoint)
    if "device" not in opened.facts:
        return dict(opened.facts)
    return {**opened.facts, "weight_bytes": weight_bytes(checkpoint), "weights": device_types(checkpoint)}


def device_types(checkpoint: Checkpoint) -> list[dict[str, object]]:
    """What the tensors of each stored type become on a device."""
    groups: dict[tuple[str, str], list[TensorInfo]] = {}
    for info in checkpoint.infos:
        groups.setdefault((info.type, stored_as(info)), []).append(info)
    return [
        {"type": stored, "as": there, "count": len(infos), "bytes": sum(map(tensor_bytes, infos))}
        for (stored, there), infos in sorted(groups.items())
    ]


def dialect_facts(checkpoint: Checkpoint) -> dict[str, object]:
    """How the model writes tool calls and reasoning. Nothing if no chat template can be read."""
    try:
        tokenizer = tokenizer_of(checkpoint)
    except KvarnError:  # the rest of the file is worth to be shown
        return {}
    if not tokenizer.chat_template:
        return {}
    template = TemplateProcess(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    try:
        eos = [tokenizer.token_bytes(id).decode("utf-8", "replace") for id in tokenizer.eos_ids]
        dialect = find(template.render, source=tokenizer.chat_template, eos=eos)
    finally:
        template.close()
    facts = {
        "name": dialect.name,
        "origin": dialect.origin,
        "form": dialect.form,
        "call_begin": dialect.section[0] + dialect.call[0],
        "call_end": dialect.call[1] + dialect.section[1],
        "parallel": dialect.parallel,
        "reasoning": list(dialect.reasoning or ()),
    }
    return {"dialect": facts}


def tensor_row(info: TensorInfo) -> dict[str, object]:
    """What is stored, and what it becomes in memory."""
    packed = packed_size(info)
    stored = {"name": info.name, "shape": list(info.shape), "type": info.type, "bytes": info.nbytes}
    return {**stored, "packed": packed.kind, "packed_bytes": packed.nbytes}


def by_type(tensors: list[dict[str, object]]) -> list[dict[str, object]]:
    """Counts and bytes of each stored type and what it becomes."""
    groups: dict[tuple[str, str], list[dict[str, object]]] = {}
    for row in tensors:
        groups.setdefault((str(row["type"]), str(row["packed"])), []).append(row)
    return [
        {
            "type": stored,
            "count": len(rows),
            "bytes": sum(int(str(row["bytes"])) for row in rows),
            "packed": packed,
            "packed_bytes": sum(int(str(row["packed_bytes"])) for row in rows),
        }
        for (stored, packed), rows in sorted(groups.items())
    ]


def kv_rows(checkpoint: Checkpoint, strategy: str, context: int, window: int | None) -> list[dict[str, object]]:
    windowed = window if STRATEGIES[strategy].windowed else None
    rows: list[dict[str, object]] = []
    for codec in CODECS:
        config = CacheConfig(checkpoint.config.layer_specs, context, strategy, codec, window=windowed)
        try:
            made = plan(config)
        except KvarnError:  # repeated, where there is nothing to repeat
            continue
        rows.append(
            {"strategy": strategy, "codec": codec, "bytes_per_token": made.bytes_per_token, "bytes": made.nbytes}
        )
    return rows


def show(facts: dict[str, Any]) -> None:
    lines = [("model", facts["model"]), ("name in the file", facts["name"]), ("architecture", facts["architecture"])]
    for key in ("layers", "hidden", "feed_forward", "vocabulary", "trained_context"):
        lines.append((key.replace("_", " "), f"{facts[key]:,}"))
    lines.append(("rope base", f"{facts['rope_base']:,.10g}"))
    lines.append(("heads", f"{facts['heads']} query, {facts['kv_heads']} KV, of {facts['head_dim']}"))
    if facts["windows"]:
        lines.append(("windows", ", ".join(f"{window:,}" for window in facts["windows"])))
    lines += dialect_lines(facts.get("dialect")) + backend_lines(facts["backend"])
    for name, value in lines:
        print(f"{name:<16} {printable(str(value))}")
    print()
    rows_of_types = [
        (t["type"], t["packed"], str(t["count"]), human_bytes(t["bytes"]), human_bytes(t["packed_bytes"]))
        for t in facts["tensors"]
    ]
    print_table(("tensors", "packed as", "count", "bytes", "packed bytes"), rows_of_types, left=2)
    print(f"\nkeys and values: bytes of a token, and of one sequence at a context of {facts['context']:,}\n")
    show_cache(facts)


def dialect_lines(facts: dict[str, Any] | None) -> list[tuple[str, str]]:
    if facts is None:
        return [("tool calls", "unknown: no chat template can be read")]
    kinds = {"family": "known family", "derived": "from its template", "generic": "by instructions; it has no format"}
    thought = " ... ".join(marker.strip() for marker in facts["reasoning"]) or "no markers"
    return [("tool calls", f"{facts['name']}, {facts['form']} ({kinds[facts['origin']]})"), ("reasoning", thought)]


def backend_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("backend", f"{facts['name']} ({facts['chosen']})")]
    if "device" in facts:
        place = f"{facts['device']}, {facts['memory']}, compute {facts['compute']}, driver {facts['driver']}"
        lines += [("device", place), ("weights", f"{human_bytes(facts['weight_bytes'])} on the device")]
        for each in facts["weights"]:
            lines.append((f"  {each['type']}", f"{each['as']}, {human_bytes(each['bytes'])}"))
        lines += [("kernels", facts["kernels"]), ("exact", facts["exact"])]
    return lines


def show_cache(facts: dict[str, Any]) -> None:
    """A row for each strategy, a column for each size of numbers: bytes of a token, then all bytes."""
    sizes: dict[str, dict[str, tuple[str, str]]] = {}  # by strategy and codec
    for row in facts["kv_cache"]:
        cells = f"{row['bytes_per_token']:,}", human_bytes(row["bytes"])
        sizes.setdefault(row["strategy"], {})[row["codec"]] = cells
    windowed = [name for name in sizes if STRATEGIES[name].windowed]
    plain = facts["window"] is None and not facts["windows"]
    shown = {name: cells for name, cells in sizes.items() if not (plain and name in windowed)}
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}  # codecs whose columns are equal
    for codec in CODECS:
        groups.setdefault(tuple(cells[codec] for cells in shown.values()), []).append(codec)
    for title, which in (("bytes per token", 0), ("total", 1)):
        header = [title, *(", ".join(codecs) for codecs in groups.values())]
        print_table(header, [[name, *(column[i][which] for column in groups)] for i, name in enumerate(shown)])
        print()
    if plain:
        one = f"{', '.join(windowed[:-1])} and {windowed[-1]}"
        print(f"{one} are left out: this model has no window.\nGive one with --window N.")
