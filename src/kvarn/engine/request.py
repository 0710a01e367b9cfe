"""Requests and their samples, in token ids. Non-goals: text, HTTP.

The known tokens of a sample are the prompt and the sampled tokens. The computed tokens are those whose
keys and values are in the cache. A step computes more of the known tokens. Prefill, decode, a prefix
hit and recomputation after a preemption need no separate states.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvarn.cache.adoption import NOT_FETCHED, Adoption, Fetched
from kvarn.engine.constraint import FREE, Constraint
from kvarn.engine.params import SamplingParams
from kvarn.engine.pooling import Pool
from kvarn.engine.sources import Source

if TYPE_CHECKING:
    from kvarn.engine.drafting import Drafter
    from kvarn.engine.sampling import Sampled, Sampler


@dataclass(slots=True, eq=False)
class Sample:
    """One continuation of a request's prompt."""

    id: int  # the sequence in the cache
    request: "Request"
    index: int  # which of the request's n samples
    tokens: list[int]  # known: prompt and output
    computed: int = 0
    furthest: int = 0  # the largest `computed` so far: below it, a step recomputes after a preemption or a fork
    last_token_at: float | None = None
    finish_reason: str | None = None  # stop, length, cancelled, error
    limit: str | None = None  # what a sample of finish_reason length reached: max_tokens or context
    constraint: Constraint = FREE
    complete: bool = False  # its constraint ended it; its last token is text, not an end token

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def n_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.computed


class Begun(NamedTuple):
    """An answer that another request began."""

    tokens: Sequence[int]
    sample: int = 0  # which of that request's samples it was: its draws depend on it


@dataclass(slots=True)
class Timing:
    """Times of a request, in seconds of time.perf_counter."""

    queued_at: float
    started_at: float | None = None  # first admitted
    first_token_at: float | None = None
    finished_at: float | None = None
    prefill_seconds: float = 0.0  # its share of the steps that computed its prompt for the first time
    recomputed_seconds: float = 0.0  # its share of the steps that recomputed tokens after preemptions
    recomputed_tokens: int = 0


@dataclass(slots=True, eq=False)
class Request:
    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    timing: Timing
    salt: bytes = b""
    conversation: Hashable = None  # requests of one conversation continue one parked sequence
    priority: int = 0  # how often eviction skips the blocks that it leaves in the cache
    pool: Pool | None = None  # takes its hidden states; then it has no answer
    samples: list[Sample] = field(default_factory=list)
    sampler: "Sampler" = field(init=False)
    drafter: "Drafter" = field(init=False)  # what the sampler does, for a device
    host_only: str | None = None  # the setting for which a device cannot sample, if there is one
    draws_alike: bool = False  # whether a device gets equal numbers for every token
    runs_ahead: bool = False  # whether a token can be drawn before the host knows the one before it
    sampled: Counter[str] = field(default_factory=Counter)  # tokens, by where: `device`, or why the host did
    prompt_logprobs: list["Sampled"] = field(default_factory=list)  # of the second prompt token and those after it
    n_begun: int = 0  # tokens of the answer that it was given
    source: Source | None = None  # the snapshot from which reused tokens came
    adoption: Adoption | None = None  # what the prompt reused at its first admission
    fetched: Fetched = NOT_FETCHED  # what tiers gave to it then
    preemptions: int = 0
    error: BaseException | None = None  # the error that ended it, if any

    @property
    def n_reusable(self) -> int:
        """Prompt tokens that need not be computed: all, or those whose log-probabilities or states are known."""
        known = len(self.prompt_logprobs) if self.pool is None else self.pool.n_rows
        asked = self.params.prompt_logprobs is not None if self.pool is None else self.pool.wants_all
        return known if asked and known < len(self.prompt) - 1 else len(self.prompt)

    @property
    def done(self) -> bool:
        return all(sample.finish_reason for sample in self.samples)
