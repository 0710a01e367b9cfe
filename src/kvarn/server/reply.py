"""The formats of OpenAI's answers: whole answers, and chunks of a stream. Non-goals: waiting, HTTP.

The parts of a chat's answer come as kvarn.dialect's deltas, and only this file gives them OpenAI's form.
"""

import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvarn.chats.answer import Reader
from kvarn.dialect import CallArguments, CallBegin, Content, Delta, Malformed, Reasoning
from kvarn.engine.explain import Explanation
from kvarn.jobs.job import TokenLogprob
from kvarn.server.schema import Json

LEAST = -9999.0  # the smallest log-probability, because JSON has no -infinity

TokenBytes = Callable[[int], bytes]


@dataclass(slots=True)
class Reply:
    """Formats all parts of one answer."""

    chat: bool
    model: str
    token_bytes: TokenBytes
    reasoning: bool = True  # the answer has the model's reasoning
    fingerprint: str | None = None  # changes if the bits of answers may change
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = ""
    _offsets: dict[int, int] = field(default_factory=dict)  # characters of each choice sent so far

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"

    def whole(self, choices: list[Json], usage: Json, explanation: Json) -> Json:
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage, "kvarn": explanation}

    def chunk(self, choices: list[Json], usage: Json | None = None, explanation: Json | None = None) -> Json:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        body = {**self._head(kind), "choices": choices}
        if usage is not None:
            body["usage"] = usage
        if explanation is not None:
            body["kvarn"] = explanation
        return body

    def choice(self, index: int, answer: Reader, logprobs: Sequence[TokenLogprob] | None, finish: str) -> Json:
        end = {"logprobs": self._logprobs(index, logprobs), "finish_reason": answer.finish_reason(finish)}
        if self.chat:
            return {"index": index, "message": self._message(answer), **end}
        return {"index": index, "text": answer.content, **end}

    def _message(self, answer: Reader) -> Json:
        content = answer.content if answer.content.strip() or not answer.calls else None
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning and self.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [call.as_field() for call in answer.calls]
        return message

    def opening(self, index: int, first: Json | None) -> Json:
        """The first chunk of a choice of a chat. `first`: the delta that follows it."""
        content = None if first and "content" not in first else ""
        return _chunked(index, {"role": "assistant", "content": content})

    def deltas(
        self, index: int, parts: Sequence[Delta], logprobs: Sequence[TokenLogprob] | None, finish: str | None
    ) -> list[Json]:
        """The choices of the chunks for these parts, and for the end if there is a `finish`. There is no chunk for
        nothing; the log-probabilities are in the first one."""
        if not self.chat:
            text = "".join(part.text for part in parts if isinstance(part, Content))
            entries = self._logprobs(index, logprobs)
            return [{"index": index, "text": text, "logprobs": entries, "finish_reason": finish}]
        found = [_chunked(index, body) for part in parts if (body := self._body(part))]
        if (finish and not (found and "content" in found[-1]["delta"])) or (logprobs and not found):
            found.append(_chunked(index, {}))
        if logprobs is not None and found:
            found[0]["logprobs"] = self._logprobs(index, logprobs)
        if finish:
            found[-1]["finish_reason"] = finish
        return found

    def _body(self, part: Delta) -> Json:
        """Empty if the client sees nothing of it."""
        match part:
            case Content(text) | Malformed(text):
                return {"content": text} if text else {}
            case Reasoning(text):
                return {"reasoning_content": text} if self.reasoning and text else {}
            case CallBegin(number, id, name):
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": number, "id": id, "type": "function", "function": function}]}
            case CallArguments(number, text):
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]} if text else {}
        return {}

    def _head(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    # -- log-probabilities ---------------------------------------------------------------------------------------

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob] | None) -> Json | None:
        if entries is None:
            return None
        if self.chat:
            return {"content": [self._entry(entry) for entry in entries], "refusal": None}
        return self._legacy(index, entries)

    def _entry(self, entry: TokenLogprob) -> Json:
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return {**self._token(entry.token, entry.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> Json:
        raw = self.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, LEAST), "bytes": list(raw)}

    def _legacy(self, index: int, entries: Sequence[TokenLogprob]) -> Json:
        offset, offsets, tokens = self._offsets.get(index, 0), [], []
        for entry in entries:
            tokens.append(self.token_bytes(entry.token).decode("utf-8", "replace"))
            offsets.append(offset)
            offset += len(tokens[-1])
        self._offsets[index] = offset
        tops = [
            {self.token_bytes(token).decode("utf-8", "replace"): max(p, LEAST) for token, p in entry.top}
            if not math.isnan(entry.logprob)
            else None
            for entry in entries
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [_or_null(entry.logprob) for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _chunked(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _or_null(logprob: float) -> float | None:
    """NaN stands for the first token of a prompt, which no token predicts."""
    return None if math.isnan(logprob) else max(logprob, LEAST)


def usage_of(explanations: Sequence[Explanation], n_tokens: int, n_reasoning: int) -> Json:
    prompt = sum(each.prompt for each in explanations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": n_tokens,
        "total_tokens": prompt + n_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(each.reused for each in explanations)},
        "completion_tokens_details": {"reasoning_tokens": n_reasoning},
    }


def usage_so_far(n_prompt: int, n_tokens: int) -> Json:
    return {"prompt_tokens": n_prompt, "completion_tokens": n_tokens, "total_tokens": n_prompt + n_tokens}
