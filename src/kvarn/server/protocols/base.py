"""What a protocol supplies: its addresses, and for those that answer with text a parser and a reply.

A parser makes a `Call` of a body. A `Reply` gives the answer its form: whole, or as the frames of a stream. Everything
between the two is the same for all protocols (call.py). Non-goals: the engine, waiting, HTTP.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response

from kvarn.arrays import Floats
from kvarn.cache.adoption import Adoption
from kvarn.chats.answer import Reader
from kvarn.dialect import Delta
from kvarn.engine.explain import Explanation
from kvarn.engine.params import SamplingParams
from kvarn.jobs.job import TokenLogprob
from kvarn.server.diagnostics import Comparison
from kvarn.server.faults import ErrorForm
from kvarn.server.parse import Call
from kvarn.server.refusal import Refusal
from kvarn.server.request_fields import Fields
from kvarn.server.schema import Json
from kvarn.server.timings import Progress, Timings, timings_at_end

if TYPE_CHECKING:
    from kvarn.server.app import Service

SSE = "text/event-stream; charset=utf-8"
Serve = Callable[["Service", Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Part:
    """A new part of one choice. If the call does not stream, the whole choice."""

    index: int  # of the choice
    deltas: Sequence[Delta]  # what has become certain
    answer: Reader  # all that has become certain so far
    tokens: list[int]  # the new ones
    n_tokens: int  # of the choice so far
    logprobs: list[TokenLogprob] | None  # if the call asks for them
    finish: str | None  # stop, length, tool_calls; None: there is more
    stop: str | None  # the stop text that ended it
    adoption: Adoption | None = None  # what its prompt reused
    timings: Timings | None = None  # so far, if the call asks for them
    progress: Progress | None = None  # of the prompt, if the call asks for it; then there is nothing else


class End(NamedTuple):
    """All choices are complete."""

    explanations: list[Explanation]  # of the prompts
    n_tokens: int  # of all choices
    n_reasoning: int
    told: Json  # the object `kvarn`: the explanation, and what the client should know besides
    vectors: list[Floats] = []  # noqa: RUF012 (never changed) of the prompts, if the call asks for them
    prompt_logprobs: list[list[TokenLogprob | None]] = []  # noqa: RUF012 (the same)

    @property
    def n_prompt(self) -> int:
        return sum(each.prompt for each in self.explanations)

    @property
    def n_cached(self) -> int:
        return sum(each.reused for each in self.explanations)

    @property
    def adoption(self) -> Adoption | None:
        """Of the first prompt; a chat has no other."""
        first = self.explanations[0]
        return None if first.limit is None else Adoption(first.reused, first.limit)

    @property
    def timings(self) -> Timings:
        return timings_at_end(self.explanations, self.n_tokens)


class Setting(NamedTuple):
    """What replies know about the server and the request."""

    model: str
    token_bytes: Callable[[int], bytes]
    fingerprint: str | None = None  # changes if the bits of answers may change
    prompts: Sequence[Sequence[int]] = ()
    params: SamplingParams = SamplingParams()
    shared_block: int = 0  # tokens of a block that later requests can reuse; 0: they reuse nothing
    comparison: Comparison | None = None  # with an earlier response that the call names
    spell: Callable[[Sequence[int]], str] = str  # the text of token ids
    context: int = 0  # tokens of a prompt and its answer
    width: int = 0  # numbers of a hidden state

    def n_written(self, n_prompt: int, n_cached: int) -> int:
        """Prompt tokens that this request has put into the cache for later ones: those of full blocks. The last token
        of a prompt is computed each time."""
        full = n_prompt - max(n_prompt % self.shared_block, 1) if self.shared_block else 0
        return max(full - n_cached, 0)


class Reply(Protocol):
    """Gives one answer its form. Of a stream: `begin`, `part` for each part, then `end` or `failed`. A frame is sent
    as it is; no frames for an event is allowed."""

    id: str
    created: int
    model: str
    media_type: str  # of a stream

    @property
    def headers(self) -> Mapping[str, str]:
        """Of an answer."""
        ...

    def whole(self, choices: Sequence[Part], end: End) -> Json | list[Json]: ...

    def begin(self, n_prompt: int) -> Iterable[bytes]:
        """The request is queued. `n_prompt`: tokens of all prompts."""
        ...

    def part(self, part: Part) -> Iterable[bytes]: ...

    def end(self, end: End) -> Iterable[bytes]: ...

    def failed(self, refusal: Refusal, request_id: str) -> Iterable[bytes]:
        """The stream ends here. The first frame of a stream can be one of these."""
        ...

    def error(self, refusal: Refusal, request_id: str) -> Json:
        """The body of an error response."""
        ...


class Address(NamedTuple):
    """An endpoint. `fields`: of its body, for the OpenAPI document; None if it takes none."""

    method: str
    path: str
    summary: str
    serve: Serve
    fields: Fields | None = None


class Spoken(NamedTuple):
    """A protocol: its addresses, and the form of its errors."""

    addresses: Sequence[Address]
    error: ErrorForm


def text(
    path: str,
    summary: str,
    parse: Callable[[bytes], Call],
    reply: Callable[[Setting, Call], Reply],
    fields: Fields,
) -> Address:
    """An address that answers with text of the model."""

    async def serve(service: "Service", request: Request) -> Response:
        return await service.generate(request, parse, reply)

    return Address("POST", path, summary, serve, fields)


def compact(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def sse(data: str, event: str = "") -> bytes:
    """A server-sent event."""
    return (f"event: {event}\ndata: {data}\n\n" if event else f"data: {data}\n\n").encode()
