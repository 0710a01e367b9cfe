"""A forecast as JSON: what `kvarn plan --json` prints and `GET /kvarn/plan` answers. Also beside the truth."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvarn.backends.choice import BESIDE
from kvarn.cache.plan import CacheConfig, Plan
from kvarn.forecast.device import OnDevice
from kvarn.forecast.forecast import AtDepth, Forecast
from kvarn.forecast.memory import Memory
from kvarn.forecast.miniature import Seconds
from kvarn.forecast.room import Option
from kvarn.forecast.truth import Measured

Json = dict[str, Any]


def as_json(forecast: Forecast) -> Json:
    return {
        "cache": cache_json(forecast.plan),
        "memory": memory_json(forecast.memory),
        "budget": forecast.budget,
        "fits": forecast.fits,
        "would_fit": [option_json(option, forecast.asked) for option in forecast.options],
        "read_gb_s": forecast.speed.rates.gb_s,
        "depths": [depth_json(each) for each in forecast.depths],
        "prompt": {"tokens": forecast.prompt, "tok_s": forecast.prompt_tok_s},
        "batch": {"sequences": forecast.plan.max_seqs, "tok_s": forecast.batch_tok_s},
    }


def device_json(model: OnDevice, speed: Mapping[int, Seconds] | None, depths: Sequence[int], prompt: int) -> Json:
    """Instead of `as_json`, for a model on a device. `prompt`: tokens of the prompt whose speed is told."""
    facts: Json = {
        "backend": {"name": "cuda", "device": model.name},
        "cache": cache_json(model.plan),
        "device": sizes_json(model.weights, model.plan.nbytes),
        "budget": model.budget,
        "fits": model.fits,
    }
    if speed is not None:
        facts["depths"] = [seconds_json(depth, speed[depth]) for depth in depths]
        facts["prompt"] = {"tokens": prompt, "tok_s": prompt / speed[prompt].first}
    return facts


def sizes_json(weights: int, cache: int) -> Json:
    """Bytes on a device."""
    return {"weights": weights, "beside": BESIDE, "cache": cache, "total": weights + BESIDE + cache}


def seconds_json(depth: int, seconds: Seconds) -> Json:
    return {"depth": depth, "tok_s": 1 / seconds.step, "first_token_seconds": seconds.first}


def depth_json(at: AtDepth) -> Json:
    return {
        "depth": at.depth,
        "tok_s": at.decode_tok_s,
        "limit_tok_s": at.limit_tok_s,
        "bytes_per_token": at.bytes_per_token,
        "first_token_seconds": at.first_token_s,
    }


def cache_json(plan: Plan) -> Json:
    return {
        "strategy": plan.strategy.name,
        "layout": plan.layout.name,
        "codec": plan.codec.name,
        "block_size": plan.groups[0].config.block_size,
        "windows": sorted({g.config.spec.window for g in plan.groups if g.config.spec.window is not None}),
        "sequences": plan.max_seqs,
        "context": plan.context,
        "longest": min(group.longest for group in plan.groups),
        "bytes_per_token": plan.bytes_per_token,
    }


def memory_json(memory: Memory) -> Json:
    return {
        "weights": memory.weights,
        "kinds": dict(memory.kinds),
        "cache": memory.cache,
        "evicted": memory.evicted,
        "workspace": memory.workspace,
        "process": memory.process,
        "vocabulary": memory.vocabulary,
        "bookkeeping": memory.bookkeeping,
        "pages": memory.pages,
        "total": memory.total,
    }


def option_json(option: Option, asked: CacheConfig) -> Json:
    config = option.config
    return {
        "flags": list(option.changes(asked)),
        "context": config.window if config.strategy != asked.strategy else config.context,
        "sequences": config.max_seqs,
        "codec": config.codec,
        "bytes": option.total,
    }


def compared(forecast: Forecast, held: int | None, measured: Sequence[Measured]) -> Json:
    """Forecast, truth and error. An error is the forecast over the truth, minus 1."""
    speed = forecast.speed
    seconds = [Seconds(speed.decode(each.depth), speed.prompt(each.prompt)) for each in measured]
    memory = None if held is None else pair(forecast.memory.total, held)
    return {"memory_bytes": memory, "depths": _beside(seconds, measured)}


def compared_on_device(
    model: OnDevice, speed: Mapping[int, Seconds], weights: int, measured: Sequence[Measured]
) -> Json:
    """The same. Of the device's memory, what weights take is compared: the rest is what is left."""
    rows = _beside([speed[each.depth] for each in measured], measured)
    return {"weight_bytes": pair(model.weights, weights), "depths": rows}


def _beside(seconds: Sequence[Seconds], measured: Sequence[Measured]) -> list[Json]:
    return [
        {
            "depth": each.depth,
            "tok_s": pair(1 / foreseen.step, each.decode_tok_s),
            "prompt_tokens": each.prompt,
            "first_token_seconds": pair(foreseen.first, each.first_token_s),
        }
        for foreseen, each in zip(seconds, measured, strict=True)
    ]


def pair(forecast: float | None, truth: float) -> Json:
    """Forecast, if there is one, and truth of one figure."""
    return {"forecast": forecast, "truth": truth, "error_share": None if forecast is None else forecast / truth - 1}
