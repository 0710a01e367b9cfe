"""The journal: changes add up to the whole, cost what changed, and cost nothing while nobody watches."""

import random
from collections import Counter

import pytest
from fuzz import operate
from support.book import CONFIGS, Book

from kvarn.cache.cache import KVCache
from kvarn.cache.journal import NOWHERE, BlockNow, Changes
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec

Mirror = list[dict[int, BlockNow | None]]


def apply(mirror: Mirror, changes: Changes) -> None:
    for group, each in zip(mirror, changes.groups, strict=True):
        group.update(each.blocks)


def fresh(cache: KVCache) -> tuple[Mirror, Changes]:
    cache.watching.start()
    changes = cache.watching.changes()
    return [dict(group.blocks) for group in changes.groups], changes


@pytest.mark.parametrize("name", list(CONFIGS))
def test_changes_add_up_to_what_a_fresh_look_shows(name: str) -> None:
    rng, book = random.Random(name), Book(CONFIGS[name])
    mirror, _ = fresh(book.cache)
    for op in range(240):
        operate(book, rng)
        if rng.random() < 0.6:
            apply(mirror, book.cache.watching.changes())
        if op % 12 == 0:
            apply(mirror, book.cache.watching.changes())
            whole, _ = fresh(book.cache)
            assert mirror == whole
            agrees_with_the_map(book.cache, whole)


def agrees_with_the_map(cache: KVCache, mirror: Mirror) -> None:
    """References, positions and kept blocks are those of `KVCache.map`, which shares no code with the journal."""
    for group, now in zip(cache.map(), mirror, strict=True):
        held = Counter(block for blocks in group.sequences.values() for block, _ in blocks)
        for blocks in group.sequences.values():
            for block, first in blocks:
                each = now[block]
                assert each is not None
                assert (each.references, each.position, each.used) == (held[block], first, 0)
        kept = dict(group.cached)
        shown = {block: each.tokens for block, each in now.items() if each is not None and not each.references}
        assert shown == kept
        assert {block for block, each in now.items() if each is None} == set(range(group.n_blocks)) - {*held, *kept}


def paged(n_blocks: int = 64, context: int = 512) -> KVCache:
    spec = LayerSpec(2, 1, 1, 1)
    nbytes = n_blocks * 16 * 2 * 4
    return KVCache(plan(CacheConfig([spec], context, "paged", "f32", block_size=16, max_seqs=4, cache_bytes=nbytes)))


def write(cache: KVCache, seq: int, tokens: list[int], salt: bytes = b"") -> None:
    cache.open(seq, salt)
    reused = cache.adopt(seq, [*tokens, 0]).reused
    while reused < len(tokens):
        end = min(reused + cache.plan.max_chunk, len(tokens))
        assert cache.reserve(seq, end)
        cache.launched(cache.prepare([seq]))
        cache.commit(seq, tokens[reused:end])
        reused = end


def branches(cache: KVCache) -> dict[int, set[int]]:
    """Blocks that are known, by branch."""
    (mirror,), _ = fresh(cache)
    found: dict[int, set[int]] = {}
    for block, now in mirror.items():
        if now is not None:
            found.setdefault(now.branch, set()).add(block)
    return found


def test_a_turn_that_goes_on_stays_in_its_branch_and_another_answer_begins_one() -> None:
    cache, text = paged(), list(range(100, 140))
    write(cache, 0, text)
    cache.free(0)
    assert len(branches(cache)) == 1
    write(cache, 1, text + list(range(200, 230)))  # goes on in the block that was partly filled
    cache.free(1)
    assert len(branches(cache)) == 1
    write(cache, 2, text + list(range(300, 330)))  # another continuation of the same turn
    cache.free(2)
    assert len(branches(cache)) == 2
    write(cache, 3, text, b"another salt")
    assert len(branches(cache)) == 3


def test_leaves_and_parents_lead_through_a_whole_text() -> None:
    cache, text = paged(), list(range(16 * 5 + 3))
    write(cache, 7, text)
    (mirror,), changes = fresh(cache)
    nodes = {now.node: now for now in mirror.values() if now is not None and now.node != NOWHERE}
    at, positions = changes.groups[0].leaves[7], []
    while at != NOWHERE:
        positions.append(nodes[at].position)
        at = nodes[at].parent
    assert positions == [64, 48, 32, 16, 0]
    assert cache.watching.leaves(text, b"") == [changes.groups[0].leaves[7]]
    assert cache.watching.leaves(text, b"another salt") == cache.watching.leaves(text[:15], b"") == [NOWHERE]
    (tail,) = (now for now in mirror.values() if now is not None and now.node == NOWHERE)
    assert (tail.tokens, tail.position, tail.parent) == (3, 80, changes.groups[0].leaves[7])


def test_the_cost_of_a_look_is_the_number_of_changes() -> None:
    cache = paged(4096, 16 * 4096)
    write(cache, 0, list(range(16 * 2000)))
    cache.watching.start()
    assert len(cache.watching.changes().groups[0].blocks) == 4096
    cache.reserve(0, 16 * 2000 + 1)
    cache.launched(cache.prepare([0]))
    cache.commit(0, [5])
    assert len(cache.watching.changes().groups[0].blocks) == 1
    assert len(cache.watching.changes().groups[0].blocks) == 1  # the block that is being written is always looked at


def test_nothing_is_noted_while_nobody_watches() -> None:
    cache = paged()
    idle = cache.placements[0].pool.touched
    cache.watching.start()
    assert cache.placements[0].pool.touched != idle
    cache.watching.stop()
    assert cache.placements[0].pool.touched is idle
    assert cache.watching.changes().groups == []
    cache.reset()
    assert cache.placements[0].pool.touched is idle


def test_a_watcher_sees_the_cache_that_was_emptied() -> None:
    cache = paged()
    write(cache, 0, list(range(40)))
    fresh(cache)
    cache.reset()
    assert set(cache.watching.changes().groups[0].blocks.values()) == {None}


def test_a_block_gives_its_tokens_only_to_the_salt_that_wrote_them() -> None:
    cache, ours, theirs = paged(), list(range(20)), list(range(50, 70))
    write(cache, 0, ours, b"ours")
    write(cache, 1, theirs, b"theirs")
    everything = range(64)
    assert sorted(cache.watching.content(0, everything, b"ours").values()) == [tuple(ours[:16]), tuple(ours[16:])]
    cache.free(0)
    assert sorted(cache.watching.content(0, everything, b"ours").values()) == [tuple(ours[:16]), tuple(ours[16:])]
    assert sorted(cache.watching.content(0, everything, b"theirs").values()) == [tuple(theirs[:16]), tuple(theirs[16:])]
    assert cache.watching.content(0, everything, b"") == {}
