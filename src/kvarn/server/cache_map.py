"""The state of the cache as JSON: every block and its owner. It contains no text of users."""

from typing import Any

from kvarn.cache.cache import KVCache


def residency(cache: KVCache) -> dict[str, Any]:
    (usage, groups_now), plan = cache.picture(), cache.plan
    groups = [
        {
            "layers": list(group.layers),
            "block_size": group.block_size,
            "blocks": group.n_blocks,
            "cached": [{"block": block, "tokens": tokens} for block, tokens in group.cached],
            "sequences": [
                {"id": seq, "blocks": [{"block": block, "first": first} for block, first in blocks]}
                for seq, blocks in group.sequences.items()
            ],
        }
        for group in groups_now
    ]
    return {
        "strategy": plan.strategy.name,
        "layout": plan.layout.name,
        "codec": plan.codec.name,
        "bytes": usage.nbytes,
        "bytes_per_token": plan.bytes_per_token,
        "blocks": {"all": usage.blocks, "used": usage.blocks_used, "cached": usage.blocks_cached},
        "evictions": usage.blocks_evicted,
        "sequences": usage.sequences,
        "resident_tokens": usage.tokens_resident,
        "prefix": {"queries": usage.prefix_queries, "hits": usage.prefix_hits, "misses": usage.prefix_misses},
        "groups": groups,
    }
