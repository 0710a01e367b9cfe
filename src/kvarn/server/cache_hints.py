"""What clients say about the cache in OpenAI's and Anthropic's words, as a soft priority of the blocks.

`cache_control`, breakpoints and times to live ask for a longer life in the cache. They raise the priority of the
request's blocks (`cache_priority`) and never change an answer. Everything is cached anyway, and to the token.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvarn.server.chat_fields import HINTS

LIFE: Mapping[str, int] = {"5m": 1, "30m": 1, "1h": 2, "24h": 3, "in_memory": 0, "in-memory": 0}  # ttl -> priority


def priority_of(body: Mapping[str, Any]) -> int:
    """Of a body that has the right form: what it asks for itself, else what its hints amount to."""
    if "cache_priority" in body:
        return int(body["cache_priority"])
    options = body.get("prompt_cache_options") or {}
    lives = [options.get("ttl"), body.get("prompt_cache_retention")]
    return max([*(_life(ttl) for ttl in lives if ttl is not None), *_marks(body)], default=0)


def _marks(body: Mapping[str, Any]) -> Iterator[int]:
    yield from _of(body)
    for name in ("system", "tools", "messages", "input"):
        yield from _of_all(body.get(name))


def _of_all(items: Any, depth: int = 3) -> Iterator[int]:
    """Of messages, tools, and the parts of messages and of results in them. A part has no parts of its own."""
    for item in items if isinstance(items, Sequence) and not isinstance(items, str) else ():
        if isinstance(item, Mapping):
            yield from _of(item)
            for name in ("content", "output") if depth > 1 else ():
                yield from _of_all(item.get(name), depth - 1)


def _of(item: Mapping[str, Any]) -> Iterator[int]:
    for name in HINTS:
        if mark := item.get(name):
            yield max(_life(mark.get("ttl", "5m")) if isinstance(mark, Mapping) else 1, 1)


def _life(ttl: Any) -> int:
    return LIFE.get(ttl, 1) if isinstance(ttl, str) else 1
