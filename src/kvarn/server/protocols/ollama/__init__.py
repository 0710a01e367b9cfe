"""Ollama's API, for programs that speak nothing else."""

from kvarn.server.protocols.base import Address, Spoken, text
from kvarn.server.protocols.ollama.calls import chat_call, embed_call, generate_call, old_embed_call
from kvarn.server.protocols.ollama.fields import (
    CHAT_FIELDS,
    EMBED_FIELDS,
    GENERATE_FIELDS,
    OLD_EMBED_FIELDS,
    SHOW_FIELDS,
)
from kvarn.server.protocols.ollama.inspection import ps, refuse, show, tags, version
from kvarn.server.protocols.ollama.reply import (
    EmbedReply,
    GenerateReply,
    OldEmbedReply,
    OllamaChatReply,
    ollama_error,
)

REFUSED = (("POST", "pull"), ("POST", "push"), ("POST", "create"), ("POST", "copy"), ("DELETE", "delete"))

OLLAMA = Spoken(
    [
        text("/api/chat", "answer a conversation, as Ollama does", chat_call, OllamaChatReply, CHAT_FIELDS),
        text("/api/generate", "answer a prompt, as Ollama does", generate_call, GenerateReply, GENERATE_FIELDS),
        text("/api/embed", "vectors of texts, as Ollama does", embed_call, EmbedReply, EMBED_FIELDS),
        text("/api/embeddings", "the vector of a text, as Ollama did", old_embed_call, OldEmbedReply, OLD_EMBED_FIELDS),
        Address("POST", "/api/show", "facts about the model", show, SHOW_FIELDS),
        Address("GET", "/api/tags", "the model of this server", tags),
        Address("GET", "/api/ps", "the model that is loaded", ps),
        Address("GET", "/api/version", "which version of Ollama's API this is", version),
        *(Address(method, f"/api/{name}", "refused: the server has one model", refuse) for method, name in REFUSED),
    ],
    ollama_error,
)
