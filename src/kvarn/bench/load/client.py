"""A client that sends one streamed request per connection and records the time of every piece of text.

HTTP/1.1 with h11 on asyncio.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import h11

from kvarn.bench.http import authorization, error_message, parse_address, request_json
from kvarn.errors import KvarnError


@dataclass(slots=True)
class Outcome:
    """The result of one request. Times are seconds of time.perf_counter."""

    start: float
    pieces: list[float] = field(default_factory=list)  # arrival times of pieces of text
    end: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.pieces[0] - self.start

    @property
    def tpot(self) -> float:
        """Mean seconds per output token after the first."""
        return (self.pieces[-1] - self.pieces[0]) / max(self.output_tokens - 1, 1)

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]


class Target:
    def __init__(self, url: str, api_key: str | None) -> None:
        self.address = parse_address(url)
        self._api_key = api_key
        self._headers = {"Host": self.address.authority, "Content-Type": "application/json", **authorization(api_key)}

    def models(self) -> list[str]:
        """The names that the server lists."""
        answer = request_json(self.address, "GET", "/v1/models", api_key=self._api_key)
        try:
            return [str(model["id"]) for model in answer["data"]]
        except (KeyError, TypeError):
            raise KvarnError(
                f"{self.address}/v1/models answered no list of models: give the name with --model"
            ) from None

    async def ask(self, body: dict[str, Any]) -> Outcome:
        outcome = Outcome(time.perf_counter())
        status, rest = 0, b""
        try:
            async for kind, data in self._exchange("/v1/completions", json.dumps(body).encode()):
                if kind == "status":
                    status = int(data)
                    continue
                rest += data
                if status == 200:
                    *lines, rest = rest.split(b"\n")
                    for line in lines:
                        _take(outcome, line, time.perf_counter())
        except KvarnError as error:
            outcome.error = str(error)
        outcome.end = time.perf_counter()
        if status not in (0, 200):
            outcome.error = f"status {status} ({error_message(rest)})"
        elif outcome.error is None and not outcome.pieces:
            outcome.error = "no text"
        return outcome

    async def _exchange(self, path: str, body: bytes) -> AsyncIterator[tuple[str, bytes]]:
        """("status", digits), then ("data", bytes) as they arrive."""
        secure = ssl.create_default_context() if self.address.secure else None
        try:
            reader, writer = await asyncio.open_connection(self.address.host, self.address.port, ssl=secure)
        except OSError as error:
            raise KvarnError(f"{self.address} does not answer: {error.strerror or error}") from None
        try:
            connection = h11.Connection(h11.CLIENT)
            headers = [*self._headers.items(), ("Content-Length", str(len(body)))]
            request = h11.Request(method="POST", target=self.address.root + path, headers=headers)
            sent = (request, h11.Data(data=body), h11.EndOfMessage())
            writer.write(b"".join(part for event in sent if (part := connection.send(event))))
            await writer.drain()
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    connection.receive_data(await reader.read(65536))
                elif isinstance(event, h11.Response):
                    yield "status", str(event.status_code).encode()
                elif isinstance(event, h11.Data):
                    yield "data", bytes(event.data)
        except (OSError, h11.RemoteProtocolError) as error:
            raise KvarnError(f"the connection broke: {error}") from None
        finally:
            writer.close()


def _take(outcome: Outcome, line: bytes, now: float) -> None:
    """Add one line of the stream to the outcome."""
    if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
        return
    try:
        event = json.loads(line[6:])
    except ValueError:
        outcome.error = "an event that is not JSON"
        return
    if "error" in event:
        outcome.error = str(event["error"].get("message", "an error"))[:200]
    if any(choice.get("text") or choice.get("finish_reason") for choice in event.get("choices", ())):
        outcome.pieces.append(now)
        outcome.output_tokens += not event.get("usage")  # one token per piece, unless the server reports usage
    if usage := event.get("usage"):
        outcome.prompt_tokens = usage.get("prompt_tokens") or 0
        outcome.output_tokens = usage.get("completion_tokens") or 0
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
