"""llama.cpp's answers of /completion and /infill: whole ones, and the frames of a stream, which has no [DONE]."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence

from kvarn.chats.answer import Reader
from kvarn.jobs.job import TokenLogprob
from kvarn.server.parse import Call
from kvarn.server.protocols.base import SSE, End, Part, Setting, compact, sse
from kvarn.server.protocols.llamacpp.settings import generation_settings
from kvarn.server.protocols.logprobs import LEAST
from kvarn.server.refusal import KINDS, Refusal
from kvarn.server.schema import Json
from kvarn.server.timings import timings_at_end

SLOT = -1  # kvarn has no slots


def llamacpp_error(refusal: Refusal, request_id: str) -> Json:
    kind = KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    if refusal.status == 503:
        kind = "unavailable_error"
    if refusal.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    return {"error": {"code": refusal.status, "message": str(refusal), "type": kind, **refusal.facts}}


class LlamaReply:
    media_type = SSE
    headers: Mapping[str, str] = {}

    def __init__(self, setting: Setting, call: Call) -> None:
        self.created = int(time.time())
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.model = setting.model
        self._setting = setting
        self._call = call
        self._last: dict[int, Part] = {}  # by choice

    def whole(self, choices: Sequence[Part], end: End) -> Json | list[Json]:
        made = [self._chosen(self._final(part, end, part.answer.content)) for part in choices or self._unanswered()]
        return made[0] if len(made) == 1 else made

    def begin(self, n_prompt: int) -> Iterator[bytes]:
        return iter(())

    def part(self, part: Part) -> Iterator[bytes]:
        if part.progress is None:
            self._last[part.index] = part
        text = "".join(getattr(delta, "text", "") for delta in part.deltas)
        if not (text or part.logprobs or part.progress or (part.tokens and not part.finish)):
            return
        body: Json = {
            "index": part.index,
            "content": text,
            "tokens": part.tokens,
            "stop": False,
            "id_slot": SLOT,
            "tokens_predicted": part.n_tokens,
            "tokens_evaluated": len(self._prompt(part)),
        }
        if part.logprobs:
            body["completion_probabilities"] = [self._entry(entry) for entry in part.logprobs]
        if part.timings is not None:
            body["timings"] = part.timings.as_json()
        if part.progress is not None:
            body["prompt_progress"] = part.progress.as_json()
        yield sse(compact(body))

    def end(self, end: End) -> Iterator[bytes]:
        for part in [self._last[index] for index in sorted(self._last)] or self._unanswered():
            yield sse(compact(self._chosen(self._final(part, end, ""))))

    def failed(self, refusal: Refusal, request_id: str) -> Iterator[bytes]:
        yield b"error: " + compact(self.error(refusal, request_id)["error"]).encode() + b"\n\n"

    def error(self, refusal: Refusal, request_id: str) -> Json:
        return llamacpp_error(refusal, request_id)

    def _unanswered(self) -> list[Part]:
        """No answers were asked for."""
        return [Part(i, [], Reader(), [], 0, None, "length", None) for i in range(len(self._setting.prompts))]

    def _prompt(self, part: Part) -> Sequence[int]:
        return self._setting.prompts[part.index // self._call.n]

    def _final(self, part: Part, end: End, content: str) -> Json:
        """`content`: empty at the end of a stream."""
        prompt, explanation = self._prompt(part), end.explanations[part.index // self._call.n]
        body = {
            "index": part.index,
            "content": content,
            "tokens": part.tokens if self._call.given.get("return_tokens") and not self._call.stream else [],
            "id_slot": SLOT,
            "stop": True,
            "model": self.model,
            "tokens_predicted": part.n_tokens,
            "tokens_evaluated": len(prompt),
            "generation_settings": self._generation_settings(),
            "prompt": self._setting.spell(prompt),
            "has_new_line": "\n" in part.answer.content,
            "truncated": part.finish == "length" and explanation.cut_by == "context",
            "stop_type": "limit" if part.finish == "length" else "eos" if part.stop is None else "word",
            "stopping_word": part.stop or "",
            "tokens_cached": explanation.reused,
            "timings": timings_at_end([explanation], part.n_tokens).as_json(),
        }
        if part.logprobs is not None and not self._call.stream:
            body["completion_probabilities"] = [self._entry(entry) for entry in part.logprobs]
        return body | {"kvarn": end.told}

    def _generation_settings(self) -> Json:
        setting = self._setting
        limit = 0 if self._call.pooling is not None else self._call.max_tokens
        return generation_settings(setting.params, setting.context, self._call.stream, limit)

    def _chosen(self, body: Json) -> Json:
        """Only what `response_fields` asks for; a/b is the field b of a."""
        fields = self._call.given.get("response_fields")
        if not fields:
            return body
        found: Json = {}
        for field in fields:
            value: object = body
            for name in field.split("/"):
                value = value.get(name, self) if isinstance(value, dict) else self
            if value is not self:
                found[field] = value
        return found

    def _entry(self, entry: TokenLogprob) -> Json:
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return {**self._token(entry.token, entry.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> Json:
        raw = self._setting.token_bytes(token)
        text = raw.decode("utf-8", "replace")
        return {"id": token, "token": text, "bytes": list(raw), "logprob": max(logprob, LEAST)}
