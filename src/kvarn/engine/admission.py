"""Checks of a request before it is queued: its tokens, its length, and room in the queue.

They change nothing. Which queued samples run is the scheduler's choice.
"""

from array import array
from collections.abc import Sequence

from kvarn.cache.cache import KVCache
from kvarn.engine.scheduler import Scheduler
from kvarn.errors import KvarnError, PromptTooLong, QueueFull
from kvarn.words import counted


def check_prompt(prompt: Sequence[int], cache: KVCache, vocab_size: int) -> None:
    if not prompt:
        raise KvarnError("the prompt is empty: give it at least one token")
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise KvarnError("the prompt is bytes: give text or token ids")
    try:
        ids = array("q", prompt)
    except (TypeError, OverflowError):
        raise KvarnError("the prompt has a token that is not an integer: give text or token ids") from None
    if any(not 0 <= token < vocab_size for token in ids):
        raise KvarnError(f"the prompt has a token outside the vocabulary of {vocab_size}")
    check_length(len(ids), cache)


def check_length(n_tokens: int, cache: KVCache, at_least: bool = False) -> None:
    """`Engine.check_length`."""
    what = f"the prompt has {'at least ' if at_least else ''}{counted(n_tokens, 'token')} and"
    context = cache.plan.context
    if n_tokens >= context:
        more = "" if cache.plan.strategy.rolls else " or raise the context (context=, -c)"
        raise PromptTooLong(
            f"{what} the context holds {context:,}: shorten the prompt{more}; "
            "the answer needs room for at least one token"
        )
    if n_tokens >= cache.longest:
        raise PromptTooLong(
            f"{what} the whole cache holds {cache.longest:,}: shorten the prompt or raise the cache's bytes "
            "(cache_bytes=, --cache-bytes)"
        )


def check_queue(scheduler: Scheduler, max_seqs: int, max_waiting: int | None) -> None:
    n_running, n_waiting = len(scheduler.running), len(scheduler.waiting)
    free = max_seqs - n_running
    if max_waiting is not None and n_waiting >= max_waiting + max(free, 0):
        raise QueueFull(f"the queue is full ({n_running} running, {n_waiting} waiting): try again later")
