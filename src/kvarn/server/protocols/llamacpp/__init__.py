"""llama.cpp's own endpoints, for programs that were written for llama-server. Its OpenAI endpoints are OpenAI's."""

from kvarn.server.protocols.base import Address, Spoken, text
from kvarn.server.protocols.llamacpp.calls import completion_call, infill_call
from kvarn.server.protocols.llamacpp.embedding import CONTENT_FIELDS, ContentReply, content_call
from kvarn.server.protocols.llamacpp.fields import COMPLETION, INFILL, TEMPLATE
from kvarn.server.protocols.llamacpp.inspection import apply_template, health, props, slots
from kvarn.server.protocols.llamacpp.reply import LlamaReply, llamacpp_error

LLAMACPP = Spoken(
    [
        text("/completion", "continue a text, as llama.cpp does", completion_call, LlamaReply, COMPLETION),
        text("/infill", "fill the gap between two texts", infill_call, LlamaReply, INFILL),
        text("/embedding", "vectors of texts, in llama.cpp's form", content_call, ContentReply, CONTENT_FIELDS),
        Address("POST", "/apply-template", "the prompt of a conversation as text", apply_template, TEMPLATE),
        Address("GET", "/props", "the model and the default settings", props),
        Address("GET", "/slots", "what is computed now, without texts", slots),
        Address("GET", "/v1/health", "whether the engine works", health),
    ],
    llamacpp_error,
)
