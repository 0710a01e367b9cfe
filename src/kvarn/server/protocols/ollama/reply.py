"""Ollama's answers: whole ones, and lines of JSON."""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from kvarn.dialect import Content, Malformed, Reasoning
from kvarn.server.parse import Call
from kvarn.server.protocols.base import End, Part, Setting, compact
from kvarn.server.protocols.logprobs import token_entry
from kvarn.server.protocols.openai.embeddings import EmbeddingReply
from kvarn.server.refusal import Refusal
from kvarn.server.schema import Json

LINES = "application/x-ndjson"
NS = 1_000_000  # in a millisecond


def ollama_error(refusal: Refusal, request_id: str) -> Json:
    return {"error": str(refusal)}


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaReply:
    """What chat and generate have in common."""

    media_type = LINES
    headers: Mapping[str, str] = {}

    def __init__(self, setting: Setting, call: Call) -> None:
        self.created = int(datetime.now(UTC).timestamp())
        self.id = f"ollama-{uuid.uuid4().hex}"
        self.model = setting.model
        self._setting = setting
        self._n_calls = 0  # that were sent
        self._finish = "load"  # of a request that asks for nothing

    def whole(self, choices: Sequence[Part], end: End) -> Json | list[Json]:
        if not choices:
            return self._body("", "", []) | self._end(end)
        (part,) = choices
        answer = part.answer
        self._finish = part.finish or "stop"
        calls = [_call(call.as_field()) for call in answer.calls]
        return self._body(answer.content, answer.reasoning, calls) | self._logprobs(part) | self._end(end)

    def begin(self, n_prompt: int) -> Iterator[bytes]:
        return iter(())

    def part(self, part: Part) -> Iterator[bytes]:
        content = "".join(delta.text for delta in part.deltas if isinstance(delta, Content | Malformed))
        thinking = "".join(delta.text for delta in part.deltas if isinstance(delta, Reasoning))
        calls = [_call(call.as_field()) for call in part.answer.calls[self._n_calls :]]
        self._n_calls += len(calls)
        self._finish = part.finish or self._finish
        if content or thinking or calls or part.logprobs:
            yield self._line(self._body(content, thinking, calls) | self._logprobs(part) | {"done": False})

    def end(self, end: End) -> Iterator[bytes]:
        yield self._line(self._body("", "", []) | self._end(end))

    def failed(self, refusal: Refusal, request_id: str) -> Iterator[bytes]:
        yield self._line(self.error(refusal, request_id))

    def error(self, refusal: Refusal, request_id: str) -> Json:
        return ollama_error(refusal, request_id)

    def _body(self, content: str, thinking: str, calls: list[Json]) -> Json:
        return {"model": self.model, "created_at": now(), **self._said(content, thinking, calls)}

    def _said(self, content: str, thinking: str, calls: list[Json]) -> Json:
        raise NotImplementedError

    def _end(self, end: End) -> Json:
        timings = end.timings
        total = sum(each.total_ms or 0.0 for each in end.explanations)
        return {
            "done": True,
            "done_reason": "length" if self._finish == "length" else "load" if self._finish == "load" else "stop",
            "total_duration": int(total * NS),
            "load_duration": 0,
            "prompt_eval_count": end.n_prompt,
            "prompt_eval_duration": int(timings.prompt_ms * NS),
            "eval_count": end.n_tokens,
            "eval_duration": int(timings.ms * NS),
            "kvarn": end.told,
        }

    def _logprobs(self, part: Part) -> Json:
        if part.logprobs is None:
            return {}
        return {"logprobs": [token_entry(entry, self._setting.token_bytes) for entry in part.logprobs]}

    def _line(self, body: Json) -> bytes:
        return f"{compact(body)}\n".encode()


class OllamaChatReply(OllamaReply):
    def _said(self, content: str, thinking: str, calls: list[Json]) -> Json:
        message: Json = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class GenerateReply(OllamaReply):
    def _said(self, content: str, thinking: str, calls: list[Json]) -> Json:
        return {"response": content} | ({"thinking": thinking} if thinking else {})


class EmbedReply(EmbeddingReply):
    def whole(self, choices: Sequence[Part], end: End) -> Json | list[Json]:
        return {
            "model": self.model,
            "embeddings": [vector.tolist() for vector in end.vectors],
            "total_duration": int(sum(each.total_ms or 0.0 for each in end.explanations) * NS),
            "load_duration": 0,
            "prompt_eval_count": end.n_prompt,
        }

    def error(self, refusal: Refusal, request_id: str) -> Json:
        return ollama_error(refusal, request_id)


class OldEmbedReply(EmbedReply):
    def whole(self, choices: Sequence[Part], end: End) -> Json | list[Json]:
        return {"embedding": end.vectors[0].tolist()}


def _call(field: Json) -> Json:
    """Arguments are an object here."""
    function = field["function"]
    return {"id": field["id"], "function": {"name": function["name"], "arguments": json.loads(function["arguments"])}}
