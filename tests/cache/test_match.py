"""How much of a prompt is matched: the same answer each time, at a cost linear in the text, over all groups."""

from support.harness import Driven, named

from kvarn.backends.reference import Reference
from kvarn.cache.adoption import Reason, ReuseLimit
from kvarn.cache.cover import covered
from kvarn.cache.group_config import GroupConfig
from kvarn.cache.placements.paged import Paged
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec


def test_adopt_says_not_sharing_for_any_prompt() -> None:
    for strategy in ("contiguous", "ring"):
        for prompt in ([], [1], [1, 2]):
            cache = Driven(CacheConfig([LayerSpec(4, 2, 8, 8)], 128, strategy, "f32"), Reference())
            cache.open(0)
            assert cache.adopt(0, prompt) == (0, ReuseLimit(Reason.NOT_SHARING, 0))


def test_a_group_that_forgot_everything_is_out_of_window_and_not_unshared() -> None:
    """The local group remembers little; that the global one still has the text shows that it was there."""
    layers = [LayerSpec(2, 1, 1, 1, window=64), LayerSpec(2, 1, 1, 1)]
    cache = Driven(CacheConfig(layers, 16_384, "paged", "f32", block_size=16, max_seqs=2), Reference())
    first, second = list(range(16_384)), list(range(10**6, 10**6 + 16_384))
    for seq, text in enumerate((first, second)):
        cache.open(seq)
        for start in range(0, len(text), 512):
            cache.reserve(seq, start + 512)
            cache.prepare([seq])
            cache.commit(seq, text[start : start + 512])
        cache.free(seq)
    cache.open(2)
    assert cache.adopt(2, first) == (0, ReuseLimit(Reason.OUT_OF_WINDOW, 16_383))


def test_explanations_are_deterministic() -> None:
    answers = set()
    keep = []  # so that addresses differ from round to round
    for _ in range(50):
        p = Paged(GroupConfig(LayerSpec(2, 1, 1, 1), 16, 64, context=512, max_chunk=512))
        keep.append(p)
        for seq in range(6):
            p.open(seq)
            p.reserve(seq, 5)
            named(p, seq, [1, 2, 3, 100 + seq, 7])
        p.open(9)
        answers.add(p.match(9, [1, 2, 3, 9, 9, 9], 5).limit)
    assert len(answers) == 1


def test_a_match_over_evicted_blocks_looks_at_each_block_once() -> None:
    """Counted, not timed: blocks looked at grow with the text, not with its square."""
    looks = []

    class Counting(list):
        def __getitem__(self, index):
            looks.append(index)
            return super().__getitem__(index)

    for n in (256, 1024):
        p = Paged(GroupConfig(LayerSpec(2, 1, 1, 1), 16, n, context=n * 16, max_chunk=n * 16))
        text = list(range(n * 16))
        p.open(0)
        p.reserve(0, n * 16)
        named(p, 0, text)
        p.free(0)
        p.open(1)
        p.reserve(1, n * 8)  # evicts half, tail first
        p.open(2)
        path = Counting(node.block is not None for node in p.tree.walk(p.residency(2).node, text))
        looks.clear()
        assert covered(path, n * 16 - 1, p.config) == n * 8
        assert len(looks) <= n + 1
