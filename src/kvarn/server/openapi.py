"""The OpenAPI document, made from the tables that check requests."""

from collections.abc import Mapping

from kvarn import __version__
from kvarn.server.request_fields import CHAT, COMPLETION, DETOKENIZE, HARMLESS, IGNORED, NO_OPS, TOKENIZE
from kvarn.server.schema import Json, Schema, nullable

ERROR: Schema = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": {"message": {"type": "string"}}}},
    "required": ["error"],
}
STATUSES = {
    "400": "a field is wrong or not implemented; the message names it",
    "401": "the API key is missing, or is not one of this server's",
    "403": "the host name or the web page is not allowed; the message names the flag that allows it",
    "404": "no such model, or no such request of this key",
    "413": "the body is too large",
    "429": "the queue is full: try again after the seconds in Retry-After",
    "503": "the server is stopping, or the engine has failed",
}
GETS = {
    "/": "name, version and endpoints of this server",
    "/v1/models": "the model of this server",
    "/v1/models/{id}": "a model by name",
    "/health": "whether the engine works",
    "/ready": "whether the server accepts requests",
    "/metrics": "metrics for Prometheus",
    "/kvarn/cache": "the cache: strategy, counts, the blocks of every sequence",
    "/kvarn/requests": "explanations of this key's last requests",
    "/openapi.json": "this document",
    "/kvarn/requests/{id}": "what a request reused, what it recomputed, and why",
}
POSTS: dict[str, tuple[str, Mapping[str, Schema], tuple[str, ...]]] = {
    "/v1/chat/completions": ("answer a conversation", CHAT, ("messages",)),
    "/v1/completions": ("continue a text or token ids", COMPLETION, ("prompt",)),
    "/tokenize": ("text to token ids", TOKENIZE, ()),
    "/detokenize": ("token ids to text", DETOKENIZE, ("tokens",)),
}


def overview() -> Json:
    """What `GET /` answers."""
    endpoints = {f"GET {path}": what for path, what in GETS.items()}
    endpoints |= {f"POST {path}": what for path, (what, _, _) in POSTS.items()}
    return {"name": "kvarn", "version": __version__, "api": "OpenAI", "base_url": "/v1", "endpoints": endpoints}


def document() -> Json:
    paths: Json = {}
    for path, what in GETS.items():
        operation: Json = {"summary": what, "responses": _responses()}
        if "{id}" in path:
            operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths[path] = {"get": operation}
    for path, (what, table, required) in POSTS.items():
        content = {"application/json": {"schema": _body(table, required)}}
        paths[path] = {
            "post": {
                "summary": what,
                "requestBody": {"required": True, "content": content},
                "responses": _responses(),
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvarn", "version": __version__},
        "paths": paths,
        "components": {
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        },
        "security": [{"key": []}, {"header": []}, {}],
    }


def _body(table: Mapping[str, Schema], required: tuple[str, ...]) -> Schema:
    properties: dict[str, Schema] = {name: {"enum": [*values, None]} for name, values in NO_OPS.items()}
    properties |= {name: {"description": "accepted; changes nothing"} for name in HARMLESS}
    properties |= {name: {"description": "accepted; has no effect, and the answer says so"} for name in IGNORED}
    properties |= {name: schema if name in required else nullable(schema) for name, schema in table.items()}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _responses() -> Json:
    error = {"application/json": {"schema": ERROR}}
    return {
        "200": {"description": "done"},
        **{status: {"description": what, "content": error} for status, what in STATUSES.items()},
    }
