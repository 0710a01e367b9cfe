"""The answers of OpenAI's chat completions: reasoning, text and calls come as kvarn.dialect's deltas."""

from collections.abc import Iterator, Sequence

from kvarn.chats.answer import Reader
from kvarn.dialect import CallArguments, CallBegin, Content, Delta, Malformed, Reasoning
from kvarn.jobs.job import TokenLogprob
from kvarn.server.parse import Call
from kvarn.server.protocols.base import Part, Setting
from kvarn.server.protocols.logprobs import token_entry
from kvarn.server.protocols.openai.reply import OpenAIReply
from kvarn.server.schema import Json


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


def _chunked(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
