"""A job: a request with the text of its samples, and its output."""

from dataclasses import dataclass, field

from kvarn.engine.engine import Event
from kvarn.engine.request import Request, Sample
from kvarn.text.stream import TextStream


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob) of the most likely tokens at this position


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    tokens: list[int]
    finish_reason: str  # stop, length, cancelled
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Output:
    """The answer to one prompt: n completions."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, reused from the cache
    completions: list[Completion]

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def tokens(self) -> list[int]:
        return self.completions[0].tokens

    @property
    def finish_reason(self) -> str:
        return self.completions[0].finish_reason


class Listener:
    """Callbacks of a job, on the thread that steps. A callback may cancel jobs; the runner refuses other calls."""

    def token(self, job: "Job", event: Event) -> None:
        """The job has a new token."""

    def ended(self, job: "Job") -> None:
        """The job is done, for any reason. Called once per job, after its last token."""


SILENT = Listener()


@dataclass(slots=True, eq=False)
class Job:
    request: Request
    texts: list[TextStream]
    listener: Listener = SILENT
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    n_taken: int = 0  # tokens of all samples that reached the text
    done: bool = False  # other threads read it, so it is set last, when all text is written

    def push(self, event: Event) -> bool:
        """Add a token to the text. True if the text has reached a stop string."""
        sample, sampled = event.sample, event.sampled
        if sampled.logprob is not None:
            self.logprobs.setdefault(sample.index, []).append(TokenLogprob(sampled.token, sampled.logprob, sampled.top))
        text = self.texts[sample.index]
        ended_by_token = sample.finish_reason == "stop"
        stopped = not ended_by_token and text.push(sampled.token)
        if sample.finish_reason or stopped:
            text.close()
        self.n_taken += 1
        return stopped

    @property
    def complete(self) -> bool:
        """Whether every sampled token has reached the text."""
        return self.n_taken == sum(sample.n_output for sample in self.request.samples)

    def output(self) -> Output:
        adoption = self.request.adoption
        completions = [self._completion(sample) for sample in self.request.samples]
        return Output(len(self.request.prompt), adoption.reused if adoption else 0, completions)

    def _completion(self, sample: Sample) -> Completion:
        return Completion(
            self.texts[sample.index].text,
            sample.output,
            sample.finish_reason or "cancelled",
            self.logprobs.get(sample.index, []),
        )
