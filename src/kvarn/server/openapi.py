"""The OpenAPI document, made from the tables that check requests."""

import re
from typing import NamedTuple

from kvarn import __version__
from kvarn.server.protocols import PROTOCOLS
from kvarn.server.request_fields import DETOKENIZE, TOKENIZE, Fields
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
    "/kvarn/plan": "forecast of memory and speed, the truth so far, and the error",
    "/kvarn/requests": "explanations of this key's last requests",
    "/openapi.json": "this document",
    "/kvarn/requests/{id}": "what a request reused, what it recomputed, and why",
}
PAGE = {
    "/": "name, version and endpoints of this server; for a browser, a page that shows the cache",
    "/kvarn/page/{name}": "a file of that page",
    "/kvarn/live": "the cache and the requests as they change, a line of JSON at a time",
    "/kvarn/cache/texts": "the texts in those blocks of the query that belong to this key",
}
POSTS: dict[str, tuple[str, Fields]] = {
    "/tokenize": ("text to token ids", Fields(TOKENIZE)),
    "/detokenize": ("token ids to text", Fields(DETOKENIZE, ("tokens",))),
}


class _Operation(NamedTuple):
    method: str
    path: str
    summary: str
    fields: Fields | None = None


def _operations(page: bool) -> list[_Operation]:
    spoken = [each for protocol in PROTOCOLS for each in protocol.addresses]
    return [
        *(_Operation("GET", path, what) for path, what in (GETS | (PAGE if page else {})).items()),
        *(_Operation(each.method, each.path, each.summary, each.fields) for each in spoken),
        *(_Operation("POST", path, what, fields) for path, (what, fields) in POSTS.items()),
    ]


def overview(page: bool) -> Json:
    """What `GET /` answers. `page`: whether the server has one."""
    endpoints = {f"{each.method} {each.path}": each.summary for each in _operations(page)}
    return {"name": "kvarn", "version": __version__, "api": "OpenAI", "base_url": "/v1", "endpoints": endpoints}


def document(page: bool) -> Json:
    paths: Json = {}
    for each in _operations(page):
        operation: Json = {"summary": each.summary, "responses": _responses()}
        for name in re.findall(r"{(\w+)}", each.path):
            operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
        if each.fields is not None:
            content = {"application/json": {"schema": _body(each.fields)}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(each.path, {})[each.method.lower()] = operation
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


def _body(fields: Fields) -> Schema:
    required = fields.required
    properties: dict[str, Schema] = {name: {"enum": [*values, None]} for name, values in fields.no_ops.items()}
    properties |= {name: {"description": "accepted; changes nothing"} for name in fields.harmless}
    properties |= {name: {"description": "accepted; has no effect, and the answer says so"} for name in fields.ignored}
    properties |= {name: schema if name in required else nullable(schema) for name, schema in fields.table.items()}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _responses() -> Json:
    error = {"application/json": {"schema": ERROR}}
    return {
        "200": {"description": "done"},
        **{status: {"description": what, "content": error} for status, what in STATUSES.items()},
    }
