"""What the answers of OpenAI's chats and completions have in common, whole and as chunks. Non-goals: waiting, HTTP."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from kvarn.jobs.job import TokenLogprob
from kvarn.server.diagnostics import openai_diagnostics
from kvarn.server.faults import openai_error
from kvarn.server.parse import Call
from kvarn.server.protocols.base import SSE, End, Part, Setting, compact, sse
from kvarn.server.protocols.logprobs import LEAST
from kvarn.server.refusal import Refusal
from kvarn.server.schema import Json
from kvarn.server.timings import Timings


class OpenAIReply:
    """What both endpoints have in common."""

    media_type = SSE
    headers: Mapping[str, str] = {}
    prefix: ClassVar[str]  # of ids
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, setting: Setting, call: Call) -> None:
        self.created = int(time.time())
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.model = setting.model
        self._setting = setting
        self._call = call
        self._n_prompt = 0
        self._timings: Timings | None = None
        self._ids: dict[int, list[int]] = {}  # tokens of each choice that no chunk has yet
        self._once: Json = {}  # facts for the next chunk only
        self._n_sampled: dict[int, int] = {}  # tokens of each choice so far
        self._last: list[Json] = []  # the end of a choice, held back because it may be the last chunk

    # -- whole ---------------------------------------------------------------------------------------------------

    def whole(self, choices: Sequence[Part], end: End) -> Json:
        made = [self._choice(part) for part in choices]
        if self._call.token_ids:
            for choice, part in zip(made, choices, strict=True):
                choice["token_ids"] = part.tokens
        body = {**self._head(self.whole_kind), "choices": made, "usage": self._usage(end)}
        for name, of_prompts in self._of_prompts(end).items():
            self._place(body, name, of_prompts)
        if self._call.given.get("verbose"):
            body["__verbose"] = {"prompt": "".join(map(self._setting.spell, self._setting.prompts))}
        return body | {"timings": end.timings.as_json(), "kvarn": end.told} | self._diagnostics(end)

    def _of_prompts(self, end: End) -> Json:
        """What vLLM's fields ask for, with one entry for each prompt."""
        found: Json = {}
        if self._call.token_ids:
            found["prompt_token_ids"] = [list(prompt) for prompt in self._setting.prompts]
        if end.prompt_logprobs:
            found["prompt_logprobs"] = [[self._ranked(each) for each in prompt] for prompt in end.prompt_logprobs]
        return found

    def _place(self, body: Json, name: str, of_prompts: list[Json]) -> None:
        """Put a fact about each prompt where the endpoint has it."""
        raise NotImplementedError

    def _ranked(self, entry: TokenLogprob | None) -> Json | None:
        """By token id: the likeliest tokens, and the prompt's own, whose rank is known only if it is one of them."""
        if entry is None:
            return None
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
        return {
            str(token): {
                "logprob": max(logprob, LEAST),
                "rank": ranks.get(token),
                "decoded_token": self._spelled(token),
            }
            for token, logprob in ((entry.token, entry.logprob), *entry.top)
        }

    def _choice(self, part: Part) -> Json:
        raise NotImplementedError

    # -- streamed ------------------------------------------------------------------------------------------------

    def begin(self, n_prompt: int) -> Iterator[bytes]:
        self._n_prompt = n_prompt
        return iter(())

    def part(self, part: Part) -> Iterator[bytes]:
        if part.progress is not None:
            self._timings, self._once = part.timings, self._once | {"prompt_progress": part.progress.as_json()}
            yield self._frame(self._empty(part.index))
            return
        found = self._chunks(part)
        if self._call.token_ids:
            self._add_ids(part, found)
        if not found:
            return
        for held in self._last:
            yield self._frame(held)
        yield from self._opening(part.index)
        self._timings = part.timings
        self._n_sampled[part.index] = part.n_tokens
        self._last = [found.pop()] if part.finish and not self._call.include_usage else []
        for each in found:
            yield self._frame(each)

    def end(self, end: End) -> Iterator[bytes]:
        """The last chunk carries the explanation, and the usage if it was asked for."""
        with_usage = self._call.include_usage or self._call.continuous_usage
        self._timings = end.timings
        last = self._body(self._last, self._usage(end) if with_usage else None, end.told)
        yield sse(compact(last | self._diagnostics(end)))
        yield sse("[DONE]")

    def failed(self, refusal: Refusal, request_id: str) -> Iterator[bytes]:
        yield sse(json.dumps(self.error(refusal, request_id)))

    def error(self, refusal: Refusal, request_id: str) -> Json:
        return openai_error(refusal, request_id)

    def _chunks(self, part: Part) -> list[Json]:
        """The choices of the chunks for this part. There is none for nothing."""
        raise NotImplementedError

    def _add_ids(self, part: Part, found: list[Json]) -> None:
        """The ids of new tokens, in the first chunk after them."""
        ids = self._ids.setdefault(part.index, [])
        ids += part.tokens
        if found:
            found[0]["token_ids"], self._ids[part.index] = ids, []

    def _empty(self, index: int) -> Json:
        """The choice of a chunk that adds nothing to it."""
        raise NotImplementedError

    def _opening(self, index: int) -> Iterator[bytes]:
        return iter(())

    def _frame(self, choice: Json) -> bytes:
        if not self._call.continuous_usage:
            return self._chunk([choice])
        return self._chunk([choice], usage_so_far(self._n_prompt, sum(self._n_sampled.values())))

    def _chunk(self, choices: list[Json], usage: Json | None = None) -> bytes:
        return sse(compact(self._body(choices, usage)))

    def _body(self, choices: list[Json], usage: Json | None = None, explanation: Json | None = None) -> Json:
        body = {**self._head(self.chunk_kind), "choices": choices, **self._once}
        self._once = {}
        if usage is not None:
            body["usage"] = usage
        if self._timings is not None:
            body["timings"] = self._timings.as_json()
        if explanation is not None:
            body["kvarn"] = explanation
        return body

    def _usage(self, end: End) -> Json:
        return usage_of(end, sum(self._setting.n_written(each.prompt, each.reused) for each in end.explanations))

    def _diagnostics(self, end: End) -> Json:
        """What changed since the answer that the request names."""
        if self._call.compared is None:
            return {}
        found = openai_diagnostics(self._setting.comparison, end.adoption, end.n_prompt)
        return {"prompt_cache_diagnostics": found}

    def _head(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self._setting.fingerprint,
        }

    def _spelled(self, token: int) -> str:
        return self._setting.token_bytes(token).decode("utf-8", "replace")


def usage_of(end: End, n_written: int) -> Json:
    return {
        "prompt_tokens": end.n_prompt,
        "completion_tokens": end.n_tokens,
        "total_tokens": end.n_prompt + end.n_tokens,
        "prompt_tokens_details": {"cached_tokens": end.n_cached, "cache_write_tokens": n_written},
        "completion_tokens_details": {"reasoning_tokens": end.n_reasoning},
    }


def usage_so_far(n_prompt: int, n_tokens: int) -> Json:
    return {"prompt_tokens": n_prompt, "completion_tokens": n_tokens, "total_tokens": n_prompt + n_tokens}
