"""The model of this server, as Anthropic's clients list it. OpenAI's have the same address and another form."""

from datetime import UTC, datetime

from starlette.requests import Request

from kvarn.server.schema import Json


def asks_for_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def model_info(name: str, created: int, context: int) -> Json:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def model_page(info: Json) -> Json:
    return {"data": [info], "has_more": False, "first_id": info["id"], "last_id": info["id"]}
