"""`kvarn plan`: will a model fit and how fast will it be, before it is loaded. Only headers are read."""

import argparse
from typing import Any

from kvarn.backends import open_backend
from kvarn.backends.cache_settings import cache_config
from kvarn.backends.choice import device_for
from kvarn.backends.cpu import Cpu
from kvarn.backends.cuda.limits import require
from kvarn.backends.host_memory import available_bytes
from kvarn.backends.pool import make_pool
from kvarn.bench.machine import cpu_name
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cli import flags
from kvarn.cli.manual import add_json_flag, describe
from kvarn.cli.parser import shown
from kvarn.cli.plan_check import truth_of
from kvarn.cli.plan_words import show
from kvarn.cli.progress import ProgressLine
from kvarn.cli.table import print_json
from kvarn.errors import KvarnError, OutOfMemory
from kvarn.forecast.device import LAYOUT, OnDevice, on_device, speed_on_device
from kvarn.forecast.forecast import PROMPT, Forecast, checked_depths, foresee
from kvarn.forecast.machine import rates_of
from kvarn.forecast.memory import resident_bytes
from kvarn.forecast.miniature import Seconds
from kvarn.forecast.outlined import Outlined
from kvarn.forecast.report import as_json, compared, compared_on_device, device_json
from kvarn.lasting.settings import tier_settings
from kvarn.loading.checkpoint import Checkpoint
from kvarn.loading.headers import open_headers
from kvarn.loading.progress import Progress

FACTORS = {"k": 1 << 10, "m": 1 << 20}


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        """
Say what a model will need and how fast it will be, before it is loaded: memory for weights, cache,
workspace and process; tokens per second at several depths; the time to the first token; and what
would fit instead. Only the headers of its files are read, also of hf: names, which are not
downloaded. Speeds come from a short measurement of this machine, which is kept for a week.""",
        """
kvarn plan model.gguf -c 32768 -np 4
kvarn plan hf:org/repo:Q4_K_M --memory 8G
kvarn plan model.gguf --depth 0,4k,32k --cache-type int8
kvarn plan model.gguf --check""",
    )
    group = parser.add_argument_group("plan")
    depths = "tokens in the cache for which speed is told, such as 0,4k,32k (default: none, half and all)"
    group.add_argument("--depth", type=parse_depths, metavar="N,..", help=depths)
    memory = "plan for a machine with this much free memory (default: what is free here)"
    group.add_argument("--memory", type=flags.parse_bytes, metavar="N[K|M|G]", help=memory)
    check = "then load the model, measure it, and print forecast, truth and error"
    group.add_argument("--check", action="store_true", help=check)
    fresh = "measure this machine again, also if the last measurement is not a week old"
    group.add_argument("--fresh", action="store_true", help=fresh)
    flags.add_host_cache_flag(group)
    flags.add_model_flags(parser, tiers=False)
    add_json_flag(parser)


def parse_depths(text: str) -> tuple[int, ...]:
    """'0,4k,32k' -> (0, 4096, 32768), without repeats."""
    found = []
    for part in text.lower().split(","):
        factor = FACTORS.get(part[-1:], 1)
        number = part[:-1] if factor > 1 else part
        if not (number.isascii() and number.isdecimal()) or len(number) > 10:
            wrong = f"is {shown(text)!r}; it must be numbers of tokens with commas between them, as in 0,4k,32k"
            raise argparse.ArgumentTypeError(wrong)
        found.append(factor * int(number))
    return tuple(dict.fromkeys(found))


def run(args: argparse.Namespace) -> None:
    process = resident_bytes() or 0  # before there is a model
    tiers = tier_settings(args.host_cache, None)
    settings = flags.cache_settings(args)
    settings["cache"] = tiers.strategy(settings["cache"])
    if args.backend == "reference":
        raise KvarnError("plans are for the backends cpu and cuda: leave --backend out")
    if args.memory is not None and args.memory < 1:
        raise KvarnError("--memory is 0 bytes; give what the machine has, as in 8G")
    with ProgressLine() as line:
        checkpoint = open_headers(args.model, line, line.say)
        config = cache_config(checkpoint.config, args.model, **settings)
        device = device_of(args, config, checkpoint)
        facts = model_json(args, checkpoint)
        if device is not None:
            depths, prompt = checked_depths(config.context, args.depth), min(PROMPT, config.context - 1) or 1
            speed = speed_of(args, device, config, checkpoint, (*depths, prompt), line)
            facts |= device_json(device, speed, depths, prompt)
        else:
            backend, evicted = Cpu(make_pool(args.threads)), tiers.host_bytes or 0
            model = Outlined.of_headers(checkpoint, backend, args.max_batch_tokens, process, evicted)
            rates = rates_of(model.backend, model.work, model.plan(config), fresh=args.fresh, progress=line)
            budget = available_bytes() if args.memory is None else args.memory
            forecast = foresee(model, config, rates, args.depth, budget)
            facts |= host_json(args, model) | as_json(forecast)
    if args.check and device is not None:
        if speed is None:
            raise KvarnError("--check loads the model: it needs a device that is there and has room for it")
        truth = truth_of(args.model, settings | {"backend": "cuda"}, depths)
        facts["check"] = compared_on_device(device, speed, truth.weights, truth.speed)
    elif args.check:
        facts["check"] = check(args, settings, forecast)
    if args.json:
        print_json(facts)
    else:
        show(facts)


def device_of(args: argparse.Namespace, config: CacheConfig, checkpoint: Checkpoint) -> OnDevice | None:
    """The model on the device that would run it; None: on the host. With --memory, it need not be in this machine."""
    if args.backend == "cuda":
        require(plan(config, LAYOUT))
        if args.memory is not None:
            return on_device("an NVIDIA device", args.memory, checkpoint, config)
    elif args.memory is not None:
        return None
    device = device_for(args.backend, config, checkpoint)
    return None if device is None else on_device(device.name, device.free_bytes, checkpoint, config)


def speed_of(
    args: argparse.Namespace,
    device: OnDevice,
    config: CacheConfig,
    checkpoint: Checkpoint,
    depths: tuple[int, ...],
    progress: Progress,
) -> dict[int, Seconds] | None:
    """By depth; None: the device is not there, or has no room for the model or for what is measured."""
    if args.memory is not None or not device.fits:
        return None
    backend = open_backend("cuda", progress=progress)
    given = (backend, checkpoint, config, args.max_batch_tokens, sorted({*depths}))
    try:
        return speed_on_device(*given, fresh=args.fresh, progress=progress)
    except OutOfMemory:
        return None


def model_json(args: argparse.Namespace, checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    return {
        "model": args.model,
        "name": config.name,
        "architecture": config.architecture,
        "layers": config.n_layers,
        "trained_context": config.context,
        "budget_given": args.memory is not None,
    }


def host_json(args: argparse.Namespace, model: Outlined) -> dict[str, Any]:
    return {
        "backend": model.backend.facts(),
        "cpu": cpu_name(),
        "threads": model.backend.pool.size,
        "step_tokens": args.max_batch_tokens,
    }


def check(args: argparse.Namespace, settings: dict[str, Any], forecast: Forecast) -> dict[str, Any]:
    """Load the model in a process of its own, measure it and compare."""
    free = available_bytes()
    if free is not None and forecast.memory.total > free:
        raise OutOfMemory("--check would load a model that does not fit this machine: leave it out")
    settings = settings | {"threads": args.threads, "backend": "cpu"}
    truth = truth_of(args.model, settings, [each.depth for each in forecast.depths])
    held = None if truth.held is None else truth.held + forecast.memory.evicted  # nothing was evicted yet
    return compared(forecast, held, truth.speed)
