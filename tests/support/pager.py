"""The paged placement alone: block numbers and token ids, no device."""

from collections.abc import Iterable

from support.harness import named

from kvarn.cache.adoption import Adoption
from kvarn.cache.group_config import GroupConfig
from kvarn.cache.placements.paged import Paged
from kvarn.cache.spec import LayerSpec

SPEC = LayerSpec(4, 2, 8, 8)


def pager(n_blocks: int, block_size: int = 32, spec: LayerSpec = SPEC, watermarks=None, **dependencies) -> Paged:
    config = GroupConfig(spec, block_size, n_blocks, context=4096, max_chunk=4096, watermarks=watermarks)
    return Paged(config, **dependencies)


def prompt(placement: Paged, seq: int, tokens: Iterable[int], salt: bytes = b"") -> Adoption:
    """Open a sequence, adopt what is cached of its prompt and compute the rest."""
    tokens = list(tokens)
    placement.open(seq, salt)
    adoption = placement.adopt(seq, tokens)
    assert placement.reserve(seq, len(tokens))
    named(placement, seq, tokens[adoption.reused :])
    placement.check()
    return adoption
