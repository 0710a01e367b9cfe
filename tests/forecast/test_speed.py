"""Forecasts of speed: what they are made of. Whether they are right is measured by bench/forecast.py."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from support.tiny_gguf import write
from support.tiny_models import GOLDEN

from kvarn.backends.cache_settings import cache_config
from kvarn.backends.cpu import Cpu
from kvarn.backends.pool import make_pool
from kvarn.cache.cache import KVCache
from kvarn.cache.spec import LayerSpec
from kvarn.errors import KvarnError
from kvarn.forecast import rates as figures
from kvarn.forecast.forecast import foresee, usual_depths
from kvarn.forecast.machine import rates_of
from kvarn.forecast.outlined import Outlined
from kvarn.forecast.rates import Rates
from kvarn.forecast.speed import Speed, seen_by_all
from kvarn.loading.checkpoint import open_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Outlined:
    return Outlined.of_headers(
        open_checkpoint(write(tmp_path / "tiny.gguf", "gemma3", size=replace(GOLDEN, context=256))),
        Cpu(),
        32,
        process=0,
    )


def speed_of(model: Outlined, seconds: dict[str, float], **settings: object) -> Speed:
    config = cache_config(model.config, "tiny", **{"context": 128, "max_seqs": 1, "max_batch_tokens": 32} | settings)
    return Speed(model.work, model.plan(config), Rates(defaultdict(float, seconds)))


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("pinned", [0, 3])
def test_pairs_of_queries_and_keys(window: int | None, pinned: int) -> None:
    spec = LayerSpec(1, 1, 8, 8, window, pinned)
    for start, stop in ((0, 1), (0, 9), (3, 4), (4, 30), (20, 21)):
        pairs = sum(bool(spec.visible(q, k)) for q in range(start, stop) for k in range(q + 1))
        assert seen_by_all(spec, start, stop) == pairs


@pytest.mark.parametrize("depth", [0, 7, 100])
def test_a_step_reads_what_the_plan_says(model: Outlined, depth: int) -> None:
    """Of a real step of the cache; the weights once."""
    speed = speed_of(model, {})
    cache = KVCache(speed.plan)
    cache.open(0)
    done = 0
    while done <= depth:
        n = min(32, depth - done) or 1
        cache.reserve(0, done + n)
        step = cache.prepare([0])
        cache.launched(step)
        cache.commit(0, range(n))
        done += n
    assert speed.bytes_read(depth) == model.work.weight_bytes + speed.plan.read_bytes(step)
    shapes = {figures.read_cells(figures.shape_of(speed.plan, g.config.spec)): 1.0 for g in speed.plan.groups}
    assert speed_of(model, shapes).decode(depth) == speed.plan.read_bytes(step)


def test_work_is_that_of_the_graph(model: Outlined) -> None:
    amounts = model.work.products.values()
    config = model.config
    layer = config.hidden * (2 * config.q_width + 2 * config.kv_width + 3 * config.feed_forward)
    logits = config.hidden * config.vocab_size
    assert sum(a.per_token + a.per_wanted for a in amounts) == config.n_layers * layer + logits
    last = config.hidden * (config.q_width + 3 * config.feed_forward)  # after the last attention
    assert sum(a.per_wanted for a in amounts) == last + logits
    assert (model.work.n_products, model.work.n_attentions) == (4 * config.n_layers + 1, config.n_layers)


def test_a_prompt_is_the_sum_of_its_chunks(model: Outlined) -> None:
    multiply = {figures.multiply(kind): 1.0 for kind in model.work.products}
    speed = speed_of(model, multiply)
    per_token, per_wanted = (
        sum(getattr(a, n) for a in model.work.products.values()) for n in ("per_token", "per_wanted")
    )
    assert speed.prompt(70) == 70 * per_token + per_wanted
    steps = speed_of(model, {figures.STEP: 1.0})
    assert [steps.prompt(n) for n in (1, 32, 33, 100)] == [1, 1, 2, 4]
    reading = speed_of(model, {figures.read(kind): 1.0 for kind in model.work.products})
    assert reading.prompt(33) == 2 * model.work.weight_bytes, "a step takes at least the time to read the weights"


def test_this_machine(model: Outlined, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real trials: times that are positive, and a forecast that gets slower with depth."""
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path))
    config = cache_config(model.config, "tiny", context=128, max_seqs=2, max_batch_tokens=32)
    rates = rates_of(Cpu(make_pool(1)), model.work, model.plan(config))
    assert all(0 < seconds < 1 for seconds in rates.seconds.values())
    forecast = foresee(model, config, rates, None, 1 << 30)
    assert tuple(each.depth for each in forecast.depths) == usual_depths(128) == (0, 64, 127)
    speeds = [each.decode_tok_s for each in forecast.depths]
    assert speeds == sorted(speeds, reverse=True)
    assert all(each.limit_tok_s > 0 for each in forecast.depths)
    with pytest.raises(KvarnError, match="--depth 128: the context has 128 tokens, and one must be left"):
        foresee(model, config, rates, [0, 128], None)
    assert foresee(model, config, rates, [0], None).fits is None
