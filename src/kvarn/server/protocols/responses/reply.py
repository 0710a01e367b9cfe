"""The Response object of OpenAI's API, whole and as events of a stream."""

import json
import time
import uuid
from array import array
from collections.abc import Iterator, Mapping, Sequence

from kvarn.jobs.job import TokenLogprob
from kvarn.server.diagnostics import openai_diagnostics
from kvarn.server.faults import openai_error
from kvarn.server.parse import Call
from kvarn.server.protocols.base import SSE, End, Part, Setting, compact, sse
from kvarn.server.protocols.logprobs import token_entry
from kvarn.server.protocols.responses.calls import Asked
from kvarn.server.protocols.responses.items import listed
from kvarn.server.protocols.responses.output import Event, Output
from kvarn.server.protocols.responses.store import Responses, Stored
from kvarn.server.refusal import Refusal
from kvarn.server.schema import Json
from kvarn.server.timings import Timings

CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}  # of errors in a stream


class ResponseReply:
    """`eos`: the tokens that end a turn. It stores the response when it is complete."""

    media_type = SSE
    headers: Mapping[str, str] = {}

    def __init__(self, setting: Setting, call: Call, stored: Responses, owner: bytes, eos: Sequence[int]) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = setting.model
        self._setting = setting
        self._call = call
        self._stored = stored
        self._owner = owner
        self._eos = eos
        self._asked: Asked = call.given["asked"]
        self._output = Output()
        self._tokens: list[int] = []
        self._last: Part | None = None
        self._n_events = 0

    # -- whole and streamed --------------------------------------------------------------------------------------

    def whole(self, choices: Sequence[Part], end: End) -> Json:
        for part in choices:
            self._read(part)
        return self._complete(end)[1] | self._timings(end.timings)

    def begin(self, n_prompt: int) -> Iterator[bytes]:
        for kind in ("created", "in_progress"):
            yield self._frame({"type": f"response.{kind}", "response": self._response("in_progress")})

    def part(self, part: Part) -> Iterator[bytes]:
        if part.progress is not None:
            told = {"response": self._response("in_progress"), "prompt_progress": part.progress.as_json()}
            yield self._frame({"type": "response.in_progress", **told, **self._timings(part.timings)})
            return
        events = self._read(part)
        for event in events:
            yield self._frame(event | (self._timings(part.timings) if event is events[-1] else {}))

    def end(self, end: End) -> Iterator[bytes]:
        events, response = self._complete(end)
        for event in events:
            yield self._frame(event)
        last = {"type": f"response.{response['status']}", "response": response}
        yield self._frame(last | self._timings(end.timings))

    def failed(self, refusal: Refusal, request_id: str) -> Iterator[bytes]:
        error = {"code": CODES.get(refusal.status, "server_error"), "message": str(refusal)}
        yield self._frame({"type": "response.failed", "response": {**self._response("failed"), "error": error}})

    def error(self, refusal: Refusal, request_id: str) -> Json:
        return openai_error(refusal, request_id)

    def _read(self, part: Part) -> list[Event]:
        self._last = part
        self._tokens += part.tokens
        return list(self._output.push(part.deltas, [self._entry(each) for each in part.logprobs or ()]))

    def _complete(self, end: End) -> tuple[list[Event], Json]:
        """The last events, and the response."""
        cut = self._last is not None and self._last.finish == "length"
        events = list(self._output.finish("incomplete" if cut else "completed"))
        response = self._response("incomplete" if cut else "completed") | {
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output.items,
            "usage": self._usage(end),
            "kvarn": end.told,
        }
        if self._call.compared is not None:
            found = openai_diagnostics(self._setting.comparison, end.adoption, end.n_prompt)
            response["prompt_cache_diagnostics"] = found
        if self._call.kept:
            self._keep(response)
        return events, response

    def _timings(self, found: Timings | None) -> Json:
        return {"timings": found.as_json()} if found is not None and self._call.timed else {}

    def _frame(self, event: Event) -> bytes:
        numbered = {"type": event["type"], "sequence_number": self._n_events, **event}
        self._n_events += 1
        return sse(compact(numbered), event["type"])

    def _entry(self, entry: TokenLogprob) -> Json:
        return token_entry(entry, self._setting.token_bytes)

    # -- the object ----------------------------------------------------------------------------------------------

    def _response(self, status: str) -> Json:
        body, params = self._asked.body, self._setting.params
        reasoning, text = body.get("reasoning", {}), body.get("text", {})
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "max_tool_calls": body.get("max_tool_calls"),
            "model": self.model,
            "output": [],
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "previous_response_id": body.get("previous_response_id"),
            "prompt_cache_key": body.get("prompt_cache_key"),
            "prompt_cache_retention": body.get("prompt_cache_retention"),
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "safety_identifier": body.get("safety_identifier"),
            "service_tier": "default",
            "store": self._call.kept,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "top_logprobs": body.get("top_logprobs", 0),
            "text": {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity") or "medium"},
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": self._asked.tools,
            "truncation": "disabled",
            "metadata": body.get("metadata", {}),
            **({"user": body["user"]} if body.get("user") is not None else {}),
        }

    def _usage(self, end: End) -> Json:
        n, n_cached = end.n_prompt, end.n_cached
        details = {"cached_tokens": n_cached, "cache_write_tokens": self._setting.n_written(n, n_cached)}
        return {
            "input_tokens": n,
            "input_tokens_details": details,
            "output_tokens": end.n_tokens,
            "output_tokens_details": {"reasoning_tokens": end.n_reasoning},
            "total_tokens": n + end.n_tokens,
        }

    # -- storing -------------------------------------------------------------------------------------------------

    def _keep(self, response: Json) -> None:
        assert self._last is not None
        answer, tokens = self._last.answer, self._tokens
        if tokens and tokens[-1] in self._eos:
            tokens = tokens[:-1]
        message: Json = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [call.as_field() for call in answer.calls]
        asked = self._asked
        stored = Stored(
            self._owner,
            compact(response),
            asked.head,
            json.dumps([*asked.conversation, message]),
            json.dumps([listed(item) for item in asked.items]),
            array("i", [*self._setting.prompts[0], *tokens]),
        )
        self._stored.add(self.id, stored)
