"""OpenAI's answers: whole ones, and chunks of a stream. Non-goals: waiting, HTTP.

The parts of a chat's answer come as kvarn.dialect's deltas, and only this file gives them the form of these two
endpoints.
"""

import json
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

from kvarn.chats.answer import Reader
from kvarn.dialect import CallArguments, CallBegin, Content, Delta, Malformed, Reasoning
from kvarn.jobs.job import TokenLogprob
from kvarn.server.diagnostics import openai_diagnostics
from kvarn.server.faults import openai_error
from kvarn.server.parse import Call
from kvarn.server.protocols.base import SSE, End, Part, Setting, compact, sse
from kvarn.server.refusal import Refusal
from kvarn.server.schema import Json
from kvarn.server.timings import Timings

LEAST = -9999.0  # the smallest log-probability, because JSON has no -infinity


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


class ChatReply(OpenAIReply):
    prefix = "chatcmpl"
    whole_kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, setting: Setting, call: Call) -> None:
        super().__init__(setting, call)
        self._reasoning = call.talk is None or call.talk.reasoning
        self._opened: set[int] = set()

    def begin(self, n_prompt: int) -> Iterator[bytes]:
        if self._call.token_ids:
            self._once = {"prompt_token_ids": list(self._setting.prompts[0])}
        return super().begin(n_prompt)

    def _place(self, body: Json, name: str, of_prompts: list[Json]) -> None:
        body[name] = of_prompts[0]

    def _choice(self, part: Part) -> Json:
        end = {"logprobs": self._logprobs(part.logprobs), "finish_reason": part.finish or "stop"}
        return {"index": part.index, "message": self._message(part.answer), **end}

    def _message(self, answer: Reader) -> Json:
        content = answer.content if answer.content.strip() or not answer.calls else None
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning and self._reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [call.as_field() for call in answer.calls]
        return message

    def _empty(self, index: int) -> Json:
        return _chunked(index, {})

    def _opening(self, index: int) -> Iterator[bytes]:
        if index not in self._opened:
            self._opened.add(index)
            yield self._frame(_chunked(index, {"role": "assistant", "content": None}))

    def _chunks(self, part: Part) -> list[Json]:
        """The log-probabilities are in the first one. The last one of a choice has only its finish_reason."""
        found = [_chunked(part.index, body) for delta in part.deltas if (body := self._delta(delta))]
        if part.finish or (part.logprobs and not found):
            found.append(_chunked(part.index, {}))
        if part.logprobs is not None and found:
            found[0]["logprobs"] = self._logprobs(part.logprobs)
        if part.finish:
            found[-1]["finish_reason"] = part.finish
        return found

    def _delta(self, delta: Delta) -> Json:
        """Empty if the client sees nothing of it."""
        match delta:
            case Content(text) | Malformed(text):
                return {"content": text} if text else {}
            case Reasoning(text):
                return {"reasoning_content": text} if self._reasoning and text else {}
            case CallBegin(number, id, name):
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": number, "id": id, "type": "function", "function": function}]}
            case CallArguments(number, text):
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]} if text else {}
        return {}

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> Json | None:
        if entries is None:
            return None
        return {"content": [token_entry(entry, self._setting.token_bytes) for entry in entries], "refusal": None}


class CompletionReply(OpenAIReply):
    prefix = "cmpl"
    whole_kind = chunk_kind = "text_completion"

    def __init__(self, setting: Setting, call: Call) -> None:
        super().__init__(setting, call)
        self._offsets: dict[int, int] = {}  # characters of each choice sent so far
        self._begun: set[int] = set()  # choices that have a chunk

    def _place(self, body: Json, name: str, of_prompts: list[Json]) -> None:
        for choice in body["choices"]:
            choice[name] = of_prompts[choice["index"] // self._call.n]

    def _add_ids(self, part: Part, found: list[Json]) -> None:
        super()._add_ids(part, found)
        if part.index not in self._begun:
            self._begun.add(part.index)
            found[0]["prompt_token_ids"] = list(self._setting.prompts[part.index // self._call.n])

    def _choice(self, part: Part) -> Json:
        end = {"logprobs": self._logprobs(part.index, part.logprobs), "finish_reason": part.finish or "stop"}
        return {"index": part.index, "text": part.answer.content, **end}

    def _empty(self, index: int) -> Json:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def _chunks(self, part: Part) -> list[Json]:
        text = "".join(delta.text for delta in part.deltas if isinstance(delta, Content))
        entries = self._logprobs(part.index, part.logprobs)
        return [{"index": part.index, "text": text, "logprobs": entries, "finish_reason": part.finish}]

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob] | None) -> Json | None:
        if entries is None:
            return None
        offset, offsets, tokens = self._offsets.get(index, 0), [], []
        for entry in entries:
            tokens.append(self._spelled(entry.token))
            offsets.append(offset)
            offset += len(tokens[-1])
        self._offsets[index] = offset
        tops = [
            {self._spelled(token): max(p, LEAST) for token, p in entry.top} if not math.isnan(entry.logprob) else None
            for entry in entries
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [_or_null(entry.logprob) for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def token_entry(entry: TokenLogprob, token_bytes: Callable[[int], bytes]) -> Json:
    """A token, its log-probability and those of the likeliest tokens."""

    def of(token: int, logprob: float) -> Json:
        raw = token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, LEAST), "bytes": list(raw)}

    return {**of(entry.token, entry.logprob), "top_logprobs": [of(token, logprob) for token, logprob in entry.top]}


def _chunked(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _or_null(logprob: float) -> float | None:
    """NaN stands for the first token of a prompt, which no token predicts."""
    return None if math.isnan(logprob) else max(logprob, LEAST)


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
