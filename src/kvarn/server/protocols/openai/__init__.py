"""OpenAI's chat completions and completions, with the extensions of vLLM and llama.cpp."""

from kvarn.server.faults import openai_error
from kvarn.server.protocols.base import Address, Spoken, text
from kvarn.server.protocols.openai.calls import CHAT_FIELDS, COMPLETION_FIELDS, chat_call, completion_call
from kvarn.server.protocols.openai.chat_reply import ChatReply
from kvarn.server.protocols.openai.completion_reply import CompletionReply
from kvarn.server.protocols.openai.embeddings import (
    EMBEDDING_FIELDS,
    EmbeddingReply,
    embedding_call,
    refuse_rerank,
)
from kvarn.server.protocols.openai.render import count, render

OPENAI = Spoken(
    [
        text("/v1/chat/completions", "answer a conversation", chat_call, ChatReply, CHAT_FIELDS),
        text("/v1/completions", "continue a text or token ids", completion_call, CompletionReply, COMPLETION_FIELDS),
        text("/v1/embeddings", "vectors of texts", embedding_call, EmbeddingReply, EMBEDDING_FIELDS),
        *(
            Address("POST", path, "refused: there are no rerankers", refuse_rerank)
            for path in ("/v1/rerank", "/v1/reranking", "/v2/rerank", "/v1/score")
        ),
        Address(
            "POST", "/v1/chat/completions/render", "the token ids of a chat", render(chat_call, one=True), CHAT_FIELDS
        ),
        Address("POST", "/v1/chat/completions/input_tokens", "how many tokens a chat has", count, CHAT_FIELDS),
        Address("POST", "/v1/completions/render", "token ids of prompts", render(completion_call), COMPLETION_FIELDS),
    ],
    openai_error,
)
