"""Prefix sharing: what `adopt` reuses, and the reason it gives for stopping. Blocks of 16."""

import pytest
from support.harness import Driven, named
from support.pager import pager as blocks_of
from support.pager import prompt

from kvarn.backends.reference import Reference
from kvarn.cache.adoption import Adoption, Reason, ReuseLimit
from kvarn.cache.placement import Copy
from kvarn.cache.placements.paged import Paged
from kvarn.cache.plan import CacheConfig
from kvarn.cache.prefix import chain_hash
from kvarn.cache.spec import LayerSpec
from kvarn.cache.strategy import STRATEGIES

FULL = LayerSpec(2, 1, 1, 1)
TEXT = list(range(100, 200))


def pager(n_blocks: int = 32, spec: LayerSpec = FULL, **dependencies) -> Paged:
    return blocks_of(n_blocks, 16, spec, **dependencies)


def test_nothing_shared() -> None:
    p = pager()
    assert prompt(p, 0, TEXT) == (0, ReuseLimit(Reason.NOTHING_SHARED, 0))
    assert prompt(p, 1, [7] * 40) == (0, ReuseLimit(Reason.NOTHING_SHARED, 0))


def test_nothing_left_to_reuse_but_the_last_token() -> None:
    p = pager()
    prompt(p, 0, TEXT[:64])
    assert prompt(p, 1, TEXT[:64]) == (63, ReuseLimit(Reason.END, 63))
    assert prompt(p, 2, TEXT[:49]) == (48, ReuseLimit(Reason.END, 48))
    assert p.n_used == 4 + 1, "sequence 1's copy of the last block proved equal and went; sequence 2 has a fresh one"


def test_differs_at_a_token() -> None:
    p = pager()
    prompt(p, 0, TEXT)
    other = [*TEXT[:41], 7, *TEXT[42:]]
    words = tuple(TEXT[41:65])  # into the next blocks
    assert prompt(p, 1, other) == (41, ReuseLimit(Reason.DIFFERS, 41, ours=7, theirs=141, onward=words))
    at_the_edge = [*TEXT[:48], 8, *TEXT[49:]]
    words = tuple(TEXT[48:72])
    assert prompt(p, 2, at_the_edge) == (48, ReuseLimit(Reason.DIFFERS, 48, ours=8, theirs=148, onward=words))


def test_differs_from_the_nearest_of_many() -> None:
    p = pager(64)
    for seq, length in enumerate((17, 20, 30, 25)):
        prompt(p, seq, [*TEXT[:length], *[900 + seq] * 40])
    p.open(9)
    assert p.match(9, [*TEXT[:29], 5, 5, 5], 31).limit[:4] == (Reason.DIFFERS, 29, 5, 129)


def test_evicted() -> None:
    p = pager(8, clock=lambda: 1234.5)
    prompt(p, 0, TEXT[:64])  # 4 blocks
    p.free(0)
    prompt(p, 1, [7] * 96)  # 6 blocks: takes the 4 free ones and evicts two
    p.free(1)
    p.open(2)
    adoption = p.match(2, TEXT[:64], 63)
    assert adoption.reused == 32
    assert adoption.limit == ReuseLimit(Reason.EVICTED, 64, when=1234.5)


def test_what_was_evicted_is_found_again_once_it_is_recomputed() -> None:
    p = pager(8)
    prompt(p, 0, TEXT[:64])
    p.free(0)
    prompt(p, 1, [7] * 128)
    p.free(1)
    assert prompt(p, 2, TEXT[:64]).reused == 0
    assert prompt(p, 3, TEXT[:65]).reused == 64


@pytest.mark.parametrize("finished", [False, True])
def test_a_block_that_was_never_filled_is_reused_too(finished: bool) -> None:
    """Ten tokens of a live sequence or a finished one: copied, and what the other has behind them stays its own."""
    p = pager()
    prompt(p, 0, TEXT[:10])
    source = p.blocks(0)[0][0]
    if finished:
        p.free(0)
        assert p.n_cached == 1
    assert prompt(p, 1, TEXT[:14]) == (10, ReuseLimit(Reason.NEW, 10))
    assert p.copies() == [Copy(source, p.blocks(1)[0][0], slots=10)]
    other = prompt(p, 2, [*TEXT[:12], *[3] * 30])
    assert other == (12, ReuseLimit(Reason.DIFFERS, 12, ours=3, theirs=112, onward=(112, 113)))
    if not finished:
        assert p.reserve(0, 11)
        assert p.blocks(0)[0][0] == source, "it is not shared any more: it is written in place"


def test_while_its_unfilled_block_is_shared_a_sequence_does_not_write_into_it() -> None:
    p = pager()
    prompt(p, 0, TEXT[:10])
    p.open(1)
    assert p.adopt(1, TEXT[:14]).reused == 10
    assert p.reserve(0, 11), "before the other has its copy"
    assert len(p.copies()) == 1
    assert p.blocks(0) != p.blocks(1)
    p.check()


def test_shorter_than_a_block() -> None:
    """An unfilled block that was not kept: a fork held it when its owner went, and then gave it up."""
    p = pager()
    prompt(p, 0, TEXT[:10])
    assert p.fork(0, 1)
    p.free(0)
    assert p.rewind(1, 0) == 0
    assert prompt(p, 2, TEXT[:14]) == (0, ReuseLimit(Reason.SHORT, 10))


def test_an_unfilled_block_can_be_evicted() -> None:
    p = pager(4, clock=lambda: 99.0)
    prompt(p, 0, TEXT[:26])
    p.free(0)
    prompt(p, 1, [7] * 48)
    p.free(1)
    assert prompt(p, 2, TEXT[:30]) == (16, ReuseLimit(Reason.EVICTED, 26, when=99.0))
    assert prompt(p, 3, [*TEXT[:17], 7]) == (17, ReuseLimit(Reason.END, 17))


def test_an_unfilled_block_after_full_ones_is_reused() -> None:
    p = pager()
    prompt(p, 0, TEXT[:42])
    assert prompt(p, 1, TEXT[:50]) == (42, ReuseLimit(Reason.NEW, 42))
    prompt(p, 2, TEXT[:64])
    assert prompt(p, 3, TEXT[:60]) == (59, ReuseLimit(Reason.END, 59)), "the prompt ends inside a known block"


def test_priority_delays_eviction_and_does_not_prevent_it() -> None:
    """Eviction passes over a block once per point of priority; then it goes like any other."""
    p = pager(4)

    def text(seq: int, n: int, priority: int = 0) -> None:
        p.open(seq, b"", priority)
        tokens = [n] * 17
        p.adopt(seq, tokens)
        assert p.reserve(seq, 17)
        named(p, seq, tokens[p.sequences[seq].length :])
        p.free(seq)
        p.check()

    def left(n: int) -> int:
        p.open(99)
        reused = p.match(99, [n] * 17, 16).reused
        p.free(99)
        return reused

    text(0, 1, priority=1)
    text(1, 2)
    assert (left(1), left(2)) == (16, 16)
    text(2, 3)
    assert (left(1), left(2), left(3)) == (16, 0, 16), "the older one stayed"
    text(3, 4)
    text(4, 5)
    assert left(1) == 0, "nothing is pinned"


def test_nothing_follows_a_shared_beginning() -> None:
    p = pager()
    prompt(p, 0, TEXT[:32])
    assert prompt(p, 1, TEXT[:60]) == (32, ReuseLimit(Reason.NEW, 32))


@pytest.mark.parametrize("strategy", ["contiguous", "head-major", "repeated", "ring", "sinks"])
def test_strategy_does_not_share(strategy: str) -> None:
    cache = Driven(CacheConfig([FULL], 128, strategy, "f32", max_seqs=2), Reference())
    cache.open(0)
    assert cache.adopt(0, TEXT) == (0, ReuseLimit(Reason.NOT_SHARING, 0))
    assert cache.usage().prefix_misses == {Reason.NOT_SHARING: 1}


def test_every_strategy_answers_adopt() -> None:
    for strategy in STRATEGIES:
        cache = Driven(CacheConfig([FULL], 128, strategy, "f32"), Reference())
        cache.open(0)
        assert cache.adopt(0, TEXT).reused == 0


def test_a_window_reuses_what_is_still_resident() -> None:
    """Window 20, blocks of 16: at 64 tokens only blocks 2 and 3 are seen, and only they need to be there."""
    p = pager(16, LayerSpec(2, 1, 1, 1, window=20))
    prompt(p, 0, TEXT[:64])
    assert [first for _, first in p.blocks(0)] == [32, 48]
    p.free(0)
    assert p.n_cached == 4
    p.open(1)
    assert p.adopt(1, TEXT[:65]) == (64, ReuseLimit(Reason.END, 64))
    assert [first for _, first in p.blocks(1)] == [32, 48]
    p.check()


def test_out_of_window() -> None:
    """A prompt that branches off early needs blocks that had left the window and whose place was then taken."""
    p = pager(8, LayerSpec(2, 1, 1, 1, window=20))
    prompt(p, 0, TEXT[:80])  # 5 blocks, the first three have left the window
    prompt(p, 1, [7] * 64)  # 4 blocks: takes the three free ones and the least recent of those that left
    p.open(2)
    adoption = p.match(2, [*TEXT[:30], *[5] * 40], 69)
    assert (adoption.reused, *adoption.limit[:2]) == (0, Reason.OUT_OF_WINDOW, 16)
    adoption = p.match(2, [*TEXT[:40], *[5] * 30], 69)
    assert (adoption.reused, *adoption.limit[:2]) == (40, Reason.DIFFERS, 40), "after 40 tokens, block 0 is not seen"
    assert p.match(2, TEXT[:81], 80).reused == 80, "the end of the text is still there"


def test_isolation_by_salt() -> None:
    p = pager()
    prompt(p, 0, TEXT, salt=b"alice")
    assert prompt(p, 1, TEXT, salt=b"bob") == (0, ReuseLimit(Reason.NOTHING_SHARED, 0))
    assert prompt(p, 2, TEXT, salt=b"alice").reused == 99
    assert prompt(p, 3, [*TEXT[:20], 1, 2], salt=b"bob").limit[:4] == (Reason.DIFFERS, 20, 1, 120)


def test_a_hash_collision_is_a_miss_and_not_a_wrong_answer() -> None:
    p = pager(digest=lambda parent, tokens: b"always the same")
    prompt(p, 0, TEXT[:32])
    assert prompt(p, 1, [7] * 32).reused == 0
    assert prompt(p, 2, TEXT[:33]).reused == 31, "the second block's hash leads to the first; its tokens are found"
    for seq in range(3):
        p.free(seq)
    p.check()


def test_a_hash_without_the_parent_in_it_does_not_mix_texts() -> None:
    """The parent is compared too: the same block behind another beginning is another block."""
    p = pager(digest=lambda parent, tokens: repr(tokens).encode())
    a, b, c = TEXT[:16], TEXT[16:32], TEXT[32:48]
    prompt(p, 0, [*a, *b])
    prompt(p, 1, [*c, 1])
    assert prompt(p, 2, [*c, *b, 1]).reused == 16


def test_the_hash_chains() -> None:
    a, b = tuple(range(16)), tuple(range(16, 32))
    assert chain_hash(chain_hash(b"salt", a), b) != chain_hash(b"salt", b)
    assert chain_hash(b"salt", a) != chain_hash(b"pepper", a)
    assert chain_hash(b"salt", a).hex() == "5163fc16baf2ddfa201f2ba14917b44a", "the same in every process"


def test_equal_blocks_computed_at_the_same_time_become_one() -> None:
    p = pager()
    for seq in (0, 1):
        p.open(seq)
        p.adopt(seq, TEXT[:40])
        assert p.reserve(seq, 40)
    assert p.n_used == 6
    for seq in (0, 1):
        named(p, seq, TEXT[:40])
    p.check()
    assert p.n_used == 4
    assert p.blocks(0)[:2] == p.blocks(1)[:2]
    assert p.blocks(0)[2] != p.blocks(1)[2]


def test_a_write_into_a_shared_tail_block_copies_it() -> None:
    p = pager()
    prompt(p, 0, TEXT[:20])
    assert p.fork(0, 1)
    shared = p.blocks(0)[1][0]
    assert p.copies() == []
    assert p.reserve(1, 21)
    (copy,) = p.copies()
    assert copy == Copy(shared, p.blocks(1)[1][0], slots=4)
    assert p.blocks(0)[1][0] == shared
    assert p.reserve(0, 21)
    assert p.copies() == [], "the last owner writes in place"


def test_a_parent_that_writes_first_copies_too() -> None:
    p = pager()
    prompt(p, 0, TEXT[:20])
    assert p.fork(0, 1)
    assert p.reserve(0, 21)
    assert [copy.slots for copy in p.copies()] == [4]
    assert p.reserve(1, 21)
    assert p.copies() == []


def test_a_block_known_by_content_is_copied_before_it_is_written() -> None:
    p = pager()
    prompt(p, 0, TEXT[:32])
    p.free(0)
    prompt(p, 1, TEXT[:32])  # reuses 31 tokens and computes the last anew
    (copy,) = p.copies()
    assert copy.slots == 15
    assert copy.src != copy.dst


def test_without_room_for_a_copy_the_known_block_is_rewritten() -> None:
    p = pager(2)
    prompt(p, 0, TEXT[:32])
    p.free(0)
    assert prompt(p, 1, TEXT[:32]) == (31, ReuseLimit(Reason.END, 31))
    assert p.copies() == []
    p.free(1)
    assert prompt(p, 2, TEXT[:32]).reused == 31, "and is known again afterwards"


def test_rewind_into_a_known_block_and_on_with_other_tokens() -> None:
    p = pager()
    prompt(p, 0, TEXT[:40])
    assert p.rewind(0, 20) == 20
    assert p.reserve(0, 22)
    assert [copy.slots for copy in p.copies()] == [4]
    named(p, 0, [1, 2])
    p.check()
    assert prompt(p, 1, [*TEXT[:20], 1, 2, 3]) == (22, ReuseLimit(Reason.END, 22))
    assert prompt(p, 2, TEXT[:40]).reused == 32, "what was rewound is still known"


def test_groups_reuse_only_what_all_of_them_have() -> None:
    """The local group lost its early blocks, so a prompt that branches there reuses nothing in either group."""
    local = LayerSpec(2, 1, 1, 1, window=16)
    config = CacheConfig([local, FULL], 256, "paged", "f32", block_size=16, max_seqs=4, max_chunk=32)
    cache = Driven(config, Reference())

    def feed(seq: int, tokens: list[int]) -> Adoption:
        cache.open(seq)
        adoption = cache.adopt(seq, tokens)
        while (start := cache.length(seq)) < len(tokens):
            part = tokens[start : start + 32]
            assert cache.reserve(seq, start + len(part))
            cache.prepare([seq])
            cache.commit(seq, part)
        cache.check()
        return adoption

    feed(0, list(range(200)))
    cache.free(0)
    assert feed(1, list(range(201))) == (200, ReuseLimit(Reason.END, 200))
    cache.free(1)
    feed(2, list(range(1000, 1240)))  # takes what the local group had kept of the first text's beginning
    adoption = feed(3, [*range(50), 7, 7])
    assert adoption.reused < 48
    assert adoption.limit == ReuseLimit(Reason.OUT_OF_WINDOW, 50)
    usage = cache.usage()
    assert usage.prefix_queries == 200 + 201 + 240 + 52
    assert usage.prefix_hits == 200 + adoption.reused
    assert sum(usage.prefix_misses.values()) == 3


@pytest.mark.requirement(53, 37)
def test_hits_and_misses_are_counted_with_their_reason() -> None:
    cache = Driven(CacheConfig([FULL], 128, "paged", "f32", max_seqs=4), Reference())
    text = list(range(100))
    for seq, tokens in enumerate((text, text[:40], [*text[:40], 9, 9], [7] * 50)):
        cache.open(seq)
        reused = cache.adopt(seq, tokens).reused
        cache.reserve(seq, len(tokens))
        cache.prepare([seq])
        cache.commit(seq, tokens[reused:])
    usage = cache.usage()
    assert usage.prefix_queries == 100 + 40 + 42 + 50
    assert usage.prefix_hits == 39 + 40
    assert usage.prefix_misses == {Reason.NOTHING_SHARED: 2, Reason.DIFFERS: 1}, "one found all there was"
