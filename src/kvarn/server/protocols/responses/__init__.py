"""OpenAI's Responses API."""

from kvarn.server.faults import openai_error
from kvarn.server.protocols.base import Address, Spoken
from kvarn.server.protocols.responses.endpoints import count, create, delete, input_items, read
from kvarn.server.protocols.responses.fields import FIELDS

RESPONSES = Spoken(
    [
        Address("POST", "/v1/responses", "answer a conversation, given as items", create, FIELDS),
        Address("POST", "/v1/responses/input_tokens", "count the input tokens of a response", count, FIELDS),
        Address("GET", "/v1/responses/{id}", "a stored response", read),
        Address("DELETE", "/v1/responses/{id}", "delete a stored response", delete),
        Address("GET", "/v1/responses/{id}/input_items", "the input of a stored response", input_items),
    ],
    openai_error,
)
