"""One line about an answer, the same in `run` and `chat`: its tokens, its speed, and why it ended.

    4 + 20 tokens, 0 reused, 232/s; stopped by -n 20

A limit is named with the option that raises it. Non-goals: JSON (run.py); why not more was reused
(engine/explain.py).
"""

from typing import Any

from kvarn.engine.because import restored
from kvarn.engine.explain import explain, source_to_json
from kvarn.jobs.job import Job
from kvarn.llm import LLM

WHOLE = "end of text"


def summary(job: Job) -> str:
    """Tokens of the prompt and of the answer, and the speed of the answer."""
    output = job.output()
    n = len(output.tokens)
    tokens = "token" if output.prompt_tokens + n == 1 else "tokens"
    came = restored(snapshot_facts(job))
    return f"{output.prompt_tokens:,} + {n:,} {tokens}, {output.cached_tokens:,} reused{came}{speed(job)}"


def snapshot_facts(job: Job) -> dict[str, Any]:
    """What came from a snapshot, as explanations have it; empty if nothing did."""
    source = job.request.source
    return {} if source is None else {"snapshot": source_to_json(source)}


def speed(job: Job) -> str:
    """Tokens per second after the first one; empty if there is nothing to measure."""
    n, timing = len(job.output().tokens), job.request.timing
    if n < 2 or timing.first_token_at is None or timing.finished_at is None:
        return ""
    seconds = timing.finished_at - timing.first_token_at
    return f", {(n - 1) / seconds:,.0f}/s" if seconds > 0 else ""


def ending(llm: LLM, job: Job) -> str:
    """Why the answer ended. WHOLE: the model ended it."""
    completion, params = job.output().completions[0], job.request.params
    if completion.limit == "max_tokens":
        return f"stopped by -n {(params.max_tokens or 0) - job.request.n_begun}"
    if completion.limit == "context":
        return _full(llm)
    if completion.finish_reason == "stop":
        last = completion.tokens[-1:]
        if params.structure is not None:  # it says itself where it ends
            return WHOLE
        if last and last[0] in params.stop_token_ids:
            return "stop token"
        return WHOLE if last and last[0] in llm.tokenizer.eos_ids and not params.ignore_eos else "stop text"
    if completion.finish_reason == "error":
        return "failed"
    work = explain(job.request)
    reading = f" while reading the prompt ({work.reached:,} of {work.prompt:,})" if work.reached < work.prompt else ""
    return f"stopped{reading}"


def _full(llm: LLM) -> str:
    """What holds no more tokens. A strategy that rolls goes on to the length that the model was trained for."""
    context, longest = llm.cache.plan.context, llm.cache.longest
    if longest < context:
        return f"cache full ({longest:,} tokens, --cache-bytes)"
    if context >= llm.config.context:
        return f"the model's {context:,} tokens are full"
    return f"context full (-c {context})"
