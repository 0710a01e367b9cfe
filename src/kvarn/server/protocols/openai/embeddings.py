"""Vectors of texts: OpenAI's /v1/embeddings. Rerankers are refused by name."""

import base64
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from kvarn.arrays import Floats
from kvarn.engine.pooling import POOLINGS
from kvarn.server.faults import openai_error
from kvarn.server.parse import Call, call_of, checked, mixed_prompts
from kvarn.server.protocols.base import SSE, End, Part, Setting
from kvarn.server.refusal import Refusal
from kvarn.server.request_fields import MIXED, SHARED, Fields
from kvarn.server.schema import Json

if TYPE_CHECKING:
    from kvarn.server.app import Service

MOST_INPUTS = 2048  # of one call, as in OpenAI's API
SETTINGS = {name: SHARED[name] for name in ("model", "request_id", "cache_salt", "cache_priority")} | {
    "encoding_format": {"type": "string", "enum": ["float", "base64"]},
    "pooling": {"type": "string", "enum": list(POOLINGS), "description": "which states; default: as the model says"},
    "dimensions": {
        "type": "integer",
        "minimum": 1,
        "maximum": 2**31 - 1,
        "description": "only the size of the model's vectors: they cannot be shortened",
    },
}
EMBEDDING_FIELDS = Fields(
    {"input": MIXED, **SETTINGS}, ("input",), no_ops={"truncate_prompt_tokens": [], "priority": [0]}
)


def embedding_call(raw: bytes) -> Call:
    body = checked(raw, EMBEDDING_FIELDS)
    return call_for_vectors(body, "input")


def call_for_vectors(body: dict[str, Any], name: str) -> Call:
    prompts = mixed_prompts(body[name], name)
    if len(prompts) > MOST_INPUTS:
        raise Refusal(400, f"{name} has {len(prompts)} texts; give at most {MOST_INPUTS}", name)
    given: dict[str, Any] = {key: body[key] for key in ("encoding_format", "dimensions") if key in body}
    call = call_of(body, None, None, prompts=prompts, default_tokens=1)
    return replace(call, pooling=body.get("pooling", ""), given=given)


class EmbeddingReply:
    """It is never streamed."""

    media_type = SSE
    headers: Mapping[str, str] = {}

    def __init__(self, setting: Setting, call: Call) -> None:
        self.created = int(time.time())
        self.id = f"embd-{uuid.uuid4().hex}"
        self.model = setting.model
        self._coded = call.given.get("encoding_format") == "base64"
        wanted = call.given.get("dimensions")
        if wanted is not None and wanted != setting.width:
            message = f"dimensions is {wanted}; vectors of this model have {setting.width} and cannot be shortened"
            raise Refusal(400, message, "dimensions")

    def whole(self, choices: Sequence[Part], end: End) -> Json | list[Json]:
        data = [
            {"object": "embedding", "index": i, "embedding": self.numbers(vector)}
            for i, vector in enumerate(end.vectors)
        ]
        usage = {
            "prompt_tokens": end.n_prompt,
            "total_tokens": end.n_prompt,
            "prompt_tokens_details": {"cached_tokens": end.n_cached},
        }
        return {"id": self.id, "object": "list", "data": data, "model": self.model, "usage": usage, "kvarn": end.told}

    def numbers(self, vector: Floats) -> str | list[float]:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode() if self._coded else vector.tolist()

    def begin(self, n_prompt: int) -> Iterator[bytes]:
        return iter(())

    def part(self, part: Part) -> Iterator[bytes]:
        return iter(())

    def end(self, end: End) -> Iterator[bytes]:
        return iter(())

    def failed(self, refusal: Refusal, request_id: str) -> Iterator[bytes]:
        return iter(())

    def error(self, refusal: Refusal, request_id: str) -> Json:
        return openai_error(refusal, request_id)


async def refuse_rerank(service: "Service", request: Request) -> Response:
    service.caller(request)
    raise Refusal(400, "rerank is not implemented: kvarn runs no reranker models yet", code="not_implemented")
