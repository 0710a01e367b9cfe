"""A job: a request with the text of its samples, and its output."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kvarn.arrays import Floats
from kvarn.chats.answer import Reader, ToolCall
from kvarn.engine.engine import Event
from kvarn.engine.params import SamplingParams
from kvarn.engine.request import Request, Sample
from kvarn.engine.sampling import Sampled
from kvarn.text.stream import TextStream


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log-probability under the model, before temperature and filters.

    token       its id
    logprob     natural logarithm of its probability
    top         (token id, logprob) of the most likely tokens at its position, the likeliest first
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer to a prompt.

    text            ends before the stop text, if there was one
    tokens          token ids, with the end token
    finish_reason   stop (end token or stop text), length, cancelled or error; None while it is computed
    logprobs        one entry per token, if `SamplingParams.logprobs` asked for them
    limit           which limit a completion of finish_reason length reached: max_tokens or context
    reasoning       of a chat: what the model wrote before its answer, if its format marks it; not part of `text`
    tool_calls      of a chat with tools: the calls that the model asks for; then finish_reason is tool_calls
    tool_error      of a chat with tools: why something that looks like a call is none; it is part of `text`
    """

    text: str
    tokens: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    limit: str | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    tool_error: str | None = None

    def read(self, reader: Reader) -> "Completion":
        """The same in its parts. While it is computed, a call that has only begun is none of them."""
        reader.push(self.text)
        if self.finish_reason is not None:
            reader.finish()
        return replace(
            self,
            text=reader.content,
            finish_reason=self.finish_reason and reader.finish_reason(self.finish_reason),
            reasoning=reader.reasoning,
            tool_calls=reader.calls,
            tool_error=reader.error,
        )


@dataclass(frozen=True, slots=True)
class Output:
    """The answer to one prompt. `text`, `tokens`, `finish_reason`, `reasoning`, `tool_calls` and `tool_error` are those
    of the first completion.

    prompt              the text as given; None if token ids or messages were given
    prompt_token_ids    the token ids of the prompt
    cached_tokens       how many of them were reused from the cache
    completions         `SamplingParams.n` of them
    seed                the seed of its draws; with the same settings it gives the same answer
    params              its settings, defaults included
    prompt_logprobs     one entry per prompt token, if `SamplingParams.prompt_logprobs` asked for them. The
                        first is None, because no token predicts it
    """

    prompt: str | None
    prompt_token_ids: list[int]
    cached_tokens: int
    completions: list[Completion]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    seed: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return len(self.prompt_token_ids)

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def tokens(self) -> list[int]:
        return self.completions[0].tokens

    @property
    def finish_reason(self) -> str | None:
        return self.completions[0].finish_reason

    @property
    def reasoning(self) -> str:
        return self.completions[0].reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        return self.completions[0].tool_calls

    @property
    def tool_error(self) -> str | None:
        return self.completions[0].tool_error

    @property
    def message(self) -> dict[str, Any]:
        """The first completion as a message, for the next turn of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_field() for call in self.tool_calls]
        return message


class Listener:
    """Callbacks of a job, on the thread that steps. A callback may cancel jobs; the runner refuses other calls."""

    def token(self, job: "Job", event: Event) -> None:
        """The job has a new token."""

    def ended(self, job: "Job") -> None:
        """The job is done, for any reason. Called once per job, after its last token."""


SILENT = Listener()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Job:
    request: Request
    texts: list[TextStream]
    listener: Listener = SILENT
    prompt: str | None = None  # the text of the prompt, if it was given as text
    reader: Callable[[], Reader] | None = None  # of a chat: reads the parts of an answer
    ids: dict[int, dict[int, str]] = field(default_factory=dict)  # of the calls of each sample
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    n_taken: int = 0  # tokens of all samples that reached the text
    done: bool = False  # other threads read it, so it is set last, when all text is written

    def push(self, event: Event) -> bool:
        """Add a token to the text. True if the text has reached a stop string."""
        sample, sampled = event.sample, event.sampled
        if sampled.logprob is not None:
            self.logprobs.setdefault(sample.index, []).append(_logprob(sampled))
        text = self.texts[sample.index]
        ended_by_token = sample.finish_reason == "stop" and not sample.complete
        stopped = not ended_by_token and text.push(sampled.token)
        if sample.finish_reason or stopped:
            text.close()
        self.n_taken += 1
        return stopped

    @property
    def complete(self) -> bool:
        """Whether every sampled token has reached the text."""
        return self.n_taken == sum(sample.n_output for sample in self.request.samples)

    def new_reader(self, sample: int) -> Reader:
        """Reads this answer from its beginning. All readers of an answer give its calls the same ids."""
        reader = Reader() if self.reader is None else self.reader()
        reader.ids = self.ids.setdefault(sample, {})
        return reader

    def output(self) -> Output:
        request = self.request
        return Output(
            self.prompt,
            list(request.prompt),
            request.adoption.reused if request.adoption else 0,
            [self._completion(sample) for sample in request.samples],
            None if request.params.prompt_logprobs is None else [None, *map(_logprob, request.prompt_logprobs)],
            request.seed,
            request.params,
        )

    def vector(self) -> Floats:
        """Of a job for an embedding that is done."""
        assert self.request.pool is not None
        return self.request.pool.vector()

    def _completion(self, sample: Sample) -> Completion:
        completion = Completion(
            self.texts[sample.index].text,
            sample.output,
            sample.finish_reason,
            self.logprobs.get(sample.index, []),
            sample.limit,
        )
        return completion if self.reader is None else completion.read(self.new_reader(sample.index))


def _logprob(sampled: Sampled) -> TokenLogprob:
    assert sampled.logprob is not None
    return TokenLogprob(sampled.token, sampled.logprob, sampled.top)
