"""What a write changes, and how many bytes it moves.

A step writes the cells of its new tokens and nothing else, so its cost does not depend on how long the sequence is.
Only the write is constant: attention reads the whole history.
"""

import numpy as np
import pytest
from support.caches import SPEC, cache_of, write_step
from support.harness import bits, chunks, drive, inputs, two_backends

from kvarn.backends.reference import Reference
from kvarn.backends.reference.cells import repeat_heads
from kvarn.cache.codec import CODECS
from kvarn.cache.spec import LayerSpec
from kvarn.cache.strategy import STRATEGIES


@pytest.mark.requirement(1, 3)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_write_changes_only_the_cells_of_its_timestep(strategy: str) -> None:
    """The whole arena before and after: only the fresh timestep's bytes differ, repeated or not."""
    cache = cache_of(strategy, max_seqs=2, layers=2)
    x = inputs(SPEC, 8, seed=3)
    cache.open(0)
    write_step(cache, x.k[:7], x.v[:7])
    before = cache.arena.copy()
    write_step(cache, x.k[7:], x.v[7:])
    changed = np.flatnonzero(before.view(np.uint32) != cache.arena.view(np.uint32))
    heads = cache.stores[0].n_heads
    assert len(changed) == 2 * 2 * heads * SPEC.k_dim  # layers, K and V
    for store in cache.stores:
        block, first = cache.placements[0].blocks(0)[0]
        assert (store.k[block, 0, :, 7 - first] == repeat_heads(x.k[7:], heads // 2)[0]).all()


@pytest.mark.requirement(9)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layers_never_overwrite_each_other(strategy: str, codec: str) -> None:
    cache = cache_of(strategy, 40, codec, layers=3)
    x = [inputs(SPEC, 40, seed=layer) for layer in range(3)]
    output = drive(cache, chunks(0, 30, 10), {(0, layer): x[layer] for layer in range(3)})
    for layer in range(3):
        alone = cache_of(strategy, 40, codec)
        expected = drive(alone, chunks(0, 40), {(0, 0): x[layer]})
        assert (bits(output[0, layer]) == bits(expected[0, 0])).all()
    ends = [at.end for at in cache.plan.offsets]
    assert [at.k for at in cache.plan.offsets] == [0, *ends[:-1]]


@pytest.mark.requirement(4)
@two_backends
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_writes_constant_bytes_and_reads_linear_bytes(strategy: str, codec: str) -> None:
    spec, layers = LayerSpec(6, 2, 8, 8), 3
    cache = cache_of(strategy, 200, codec, spec, layers=layers, max_chunk=64)
    copies = spec.group if strategy == "repeated" else 1
    rows, tail = 2 * layers * spec.n_kv_heads * copies, CODECS[codec].tail
    per_token = rows * CODECS[codec].row(spec.k_dim).nbytes
    in_tail = rows * CODECS["int8"].row(spec.k_dim).nbytes if tail else 0
    x = inputs(spec, 100, seed=1)
    cache.open(0)
    for length in range(1, 101):
        step = slice(length - 1, length)
        written, read = cache.counters.written, cache.counters.read
        cache.reserve(0, length)
        cache.prepare([0])
        for layer in range(layers):
            cache.write(layer, x.k[step], x.v[step])
            cache.attend(layer, x.q[step])
        cache.commit(0, [length])
        own = (length - 1) % tail + 1 if tail else 0  # tokens of its tile
        made = per_token * (tail if own == tail else 0) if tail else per_token
        assert cache.counters.written - written == in_tail + made, "the write is constant"
        assert cache.counters.read - read == per_token * (length - own) + in_tail * own, "the read is linear"
    assert cache.counters.copied == 0
    if codec == "f32":  # the formula of the requirement, spelled out
        assert cache.counters.read - read == 2 * layers * spec.n_kv_heads * spec.k_dim * 100 * 4 * copies


@pytest.mark.requirement(11)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_write_costs_the_same_at_any_length(strategy: str) -> None:
    cache = cache_of(strategy, 4100, max_chunk=512, place=Reference())
    x = inputs(SPEC, 512, seed=0)
    cache.open(0)
    costs = []
    for target in (0, 999, 3999):
        while (missing := target - cache.length(0)) > 0:
            n = min(512, missing)
            write_step(cache, x.k[:n], x.v[:n])
        before = cache.counters.written
        write_step(cache, x.k[:1], x.v[:1])
        costs.append(cache.counters.written - before)
    assert len(set(costs)) == 1
