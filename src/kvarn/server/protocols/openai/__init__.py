"""OpenAI's chat completions and completions, with the extensions of vLLM and llama.cpp."""

from kvarn.server.faults import openai_error
from kvarn.server.protocols.base import Spoken, text
from kvarn.server.protocols.openai.calls import CHAT_FIELDS, COMPLETION_FIELDS, chat_call, completion_call
from kvarn.server.protocols.openai.reply import ChatReply, CompletionReply

OPENAI = Spoken(
    [
        text("/v1/chat/completions", "answer a conversation", chat_call, ChatReply, CHAT_FIELDS),
        text("/v1/completions", "continue a text or token ids", completion_call, CompletionReply, COMPLETION_FIELDS),
    ],
    openai_error,
)
