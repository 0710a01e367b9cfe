"""Anthropic's answers: a message, whole or as events. The whole one is folded from the same events.

Non-goals: waiting, HTTP.
"""

import json
import time
import uuid
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

from kvarn.cache.adoption import Adoption
from kvarn.dialect import CallArguments, CallBegin, CallEnd, Content, Delta, Malformed, Reasoning
from kvarn.server.diagnostics import anthropic_diagnostics
from kvarn.server.parse import Call
from kvarn.server.protocols.base import SSE, End, Part, Setting, compact, sse
from kvarn.server.refusal import Refusal
from kvarn.server.schema import Json

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def anthropic_error(refusal: Refusal, request_id: str) -> Json:
    kind = KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(refusal)}, "request_id": request_id}


class MessagesReply:
    media_type = SSE
    headers: Mapping[str, str] = {}

    def __init__(self, setting: Setting, call: Call) -> None:
        self.created = int(time.time())
        self.id = f"msg_{uuid.uuid4().hex}"
        self.model = setting.model
        self._setting = setting
        self._diagnoses = "diagnostics" in call.given
        self._blocks = Blocks(call.talk is None or call.talk.reasoning)
        self._n_prompt = 0
        self._begun = False
        self._finish: str | None = None
        self._stop: str | None = None  # the stop text that ended it

    # -- whole ---------------------------------------------------------------------------------------------------

    def whole(self, choices: Sequence[Part], end: End) -> Json:
        (part,) = choices
        events = [*self._blocks.events(part.deltas), *self._blocks.close()]
        done = {call.id for call in part.answer.calls}
        content = [block for block in folded(events) if block["type"] != "tool_use" or block["id"] in done]
        message = self._message(content, self._whole_usage(end), end.adoption, end.n_prompt)
        return message | stop_of(part.finish, part.stop, end) | {"kvarn": end.told}

    def _message(self, content: list[Json], usage: Json, adoption: Adoption | None, n_prompt: int) -> Json:
        message: Json = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        if self._diagnoses:
            message["diagnostics"] = anthropic_diagnostics(self._setting.comparison, adoption, n_prompt)
        return message

    def _usage(self, n_prompt: int, n_cached: int) -> Json:
        """The three kinds of input are the whole prompt."""
        written = self._setting.n_written(n_prompt, n_cached)
        return {
            "input_tokens": n_prompt - n_cached - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": n_cached,
        }

    def _whole_usage(self, end: End) -> Json:
        output = {"output_tokens": end.n_tokens, "output_tokens_details": {"thinking_tokens": end.n_reasoning}}
        return self._usage(end.n_prompt, end.n_cached) | output

    # -- streamed ------------------------------------------------------------------------------------------------

    def begin(self, n_prompt: int) -> Iterator[bytes]:
        """The message begins with its first part: only then it is known what the prompt has reused."""
        self._n_prompt = n_prompt
        return iter(())

    def part(self, part: Part) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            n_cached = 0 if part.adoption is None else part.adoption.reused
            usage = self._usage(self._n_prompt, n_cached) | {"output_tokens": part.n_tokens}
            message = self._message([], usage, part.adoption, self._n_prompt)
            yield _frame({"type": "message_start", "message": message})
            yield _frame({"type": "ping"})
        yield from map(_frame, self._blocks.events(part.deltas))
        if part.finish:
            self._finish, self._stop = part.finish, part.stop

    def end(self, end: End) -> Iterator[bytes]:
        yield from map(_frame, self._blocks.close())
        delta = stop_of(self._finish, self._stop, end)
        yield _frame({"type": "message_delta", "delta": delta, "usage": self._whole_usage(end), "kvarn": end.told})
        yield _frame({"type": "message_stop"})

    def failed(self, refusal: Refusal, request_id: str) -> Iterator[bytes]:
        yield _frame(self.error(refusal, request_id))

    def error(self, refusal: Refusal, request_id: str) -> Json:
        return anthropic_error(refusal, request_id)


class Blocks:
    """Turns the parts of an answer into events of content blocks. One block is open at a time."""

    def __init__(self, reasoning: bool) -> None:
        self._reasoning = reasoning  # whether the answer has it
        self._index = -1
        self._open = ""  # the type of the open block
        self._thoughts = blake2b(digest_size=32)

    def events(self, deltas: Sequence[Delta]) -> Iterator[Json]:
        for delta in deltas:
            match delta:
                case Content(text) | Malformed(text) if text:
                    yield from self._enter("text", {"type": "text", "text": ""})
                    yield self._delta({"type": "text_delta", "text": text})
                case Reasoning(text) if text and self._reasoning:
                    self._thoughts.update(text.encode("utf-8", "surrogatepass"))
                    yield from self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                    yield self._delta({"type": "thinking_delta", "thinking": text})
                case CallBegin(_, id, name):
                    yield from self._leave()
                    yield from self._enter("tool_use", {"type": "tool_use", "id": id, "name": name, "input": {}})
                case CallArguments(_, text) if text:
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
                case CallEnd():
                    yield from self._leave()

    def close(self) -> Iterator[Json]:
        """A message has at least one block."""
        if self._index < 0:
            yield from self._enter("text", {"type": "text", "text": ""})
        yield from self._leave()

    def _enter(self, kind: str, block: Json) -> Iterator[Json]:
        if self._open != kind:
            yield from self._leave()
            self._open = kind
            self._index += 1
            yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _leave(self) -> Iterator[Json]:
        if not self._open:
            return
        if self._open == "thinking":  # clients keep only blocks with a signature; it is not checked when they come back
            signature = b64encode(self._thoughts.digest()).decode()
            yield self._delta({"type": "signature_delta", "signature": signature})
        self._open = ""
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def folded(events: Sequence[Json]) -> list[Json]:
    """The content blocks that a client makes of these events."""
    blocks: list[Json] = []
    arguments: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            (_, kind), (key, value) = event["delta"].items()
            if kind == "input_json_delta":
                arguments[event["index"]] = arguments.get(event["index"], "") + value
            else:
                blocks[-1][key] += value
    for index, text in arguments.items():
        blocks[index]["input"] = _object(text)
    return blocks


def stop_of(finish: str | None, stop: str | None, end: End) -> Json:
    if finish == "stop" and stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    if finish == "length" and end.explanations[0].cut_by == "context":
        return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
    return {"stop_reason": STOPS.get(finish or "stop", "end_turn"), "stop_sequence": None}


def _object(arguments: str) -> Json:
    """Those of a call that is not complete are no JSON; it is dropped."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _frame(event: Json) -> bytes:
    return sse(compact(event), event["type"])
