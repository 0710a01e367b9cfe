"""llama.cpp's /embedding: that of OpenAI with other names, and a list as the answer."""

from collections.abc import Sequence

from kvarn.server.parse import Call, checked
from kvarn.server.protocols.base import End, Part
from kvarn.server.protocols.llamacpp.reply import llamacpp_error
from kvarn.server.protocols.openai.embeddings import SETTINGS, EmbeddingReply, call_for_vectors
from kvarn.server.refusal import Refusal
from kvarn.server.request_fields import MIXED, Fields
from kvarn.server.schema import Json

NORM = {"type": "integer", "enum": [2], "description": "2: vectors have length 1"}
CONTENT_FIELDS = Fields({"content": MIXED, "input": MIXED, "embd_normalize": NORM, **SETTINGS}, no_ops={})


def content_call(raw: bytes) -> Call:
    body = checked(raw, CONTENT_FIELDS)
    if ("content" in body) == ("input" in body):
        raise Refusal(400, "give content or input", "content")
    return call_for_vectors(body, "content" if "content" in body else "input")


class ContentReply(EmbeddingReply):
    """Each text has a list of vectors."""

    def whole(self, choices: Sequence[Part], end: End) -> Json | list[Json]:
        return [{"index": i, "embedding": [self.numbers(vector)]} for i, vector in enumerate(end.vectors)]

    def error(self, refusal: Refusal, request_id: str) -> Json:
        return llamacpp_error(refusal, request_id)
