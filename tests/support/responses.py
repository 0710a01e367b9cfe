"""Checks of answers of /v1/responses, and the conversation of their tests."""

import json
from typing import Any

from support.scripted import Client
from support.serving import Reply

PATH = "/v1/responses"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "d", "parameters": CITY, "strict": False}
OSLO = '{"city": "Oslo"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'
TEXTS = {
    "text": "It is sunny.",
    "empty": "",
    "long": "x" * 1500,
    "call": CALL,
    "said": "I look it up.\n\n" + CALL,
    "two": CALL + "\n" + CALL,
    "think": "<think>\nThe user asks.\n</think>\n\nSunny.",
    "thinkcall": "<think>\nThe user asks.\n</think>\n\n" + CALL,
    "broken": '<tool_call>\n{"name": "weather", "arguments": {"city": Oslo}}\n</tool_call>',
    "json": '{"city": "Rome"}',
}


def events_of(reply: Reply) -> list[dict]:
    """Checks the form of each event."""
    found = []
    for block in reply.body.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(found)
        found.append(event)
    return found


def joined(events: list[dict]) -> list[dict]:
    """The items of a stream, put together from its deltas."""
    items: dict[int, dict] = {}
    for event in events:
        at, kind = event.get("output_index"), event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert at == len(items)
            items[at] = {"type": event["item"]["type"], "text": "", "id": event["item"]["id"]}
        elif kind.endswith(".delta"):
            assert items[at]["id"] == event["item_id"]
            items[at]["text"] += event["delta"]
        elif kind == "output_item.done":
            items[at]["status"] = event["item"]["status"]
            assert text_of(event["item"]) == items[at]["text"]
    return [item for item in items.values() if item["type"] != "function_call" or item["status"] == "completed"]


def text_of(item: dict) -> str:
    return item["arguments"] if item["type"] == "function_call" else "".join(part["text"] for part in item["content"])


def known(response: dict) -> dict:
    """Without ids and times, which are new each time."""
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    drop = ("id", "created_at", "completed_at", "kvarn", "usage", "output")
    n = {name: response["usage"][name] for name in ("input_tokens", "output_tokens", "total_tokens")}
    return {k: v for k, v in response.items() if k not in drop} | {"output": items, "n": n}


def answer(client: Client, given: Any, **fields: Any) -> dict:
    """The whole answer. The stream must have the same."""
    body = {"input": given, "temperature": 0} | fields
    reply = client.ask(PATH, **body)
    assert reply.status == 200, reply.error
    events = events_of(client.ask(PATH, **body, stream=True))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    whole, last = reply.json, events[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert known(last["response"]) == known(whole)
    assert [item["text"] for item in joined(events)] == [text_of(item) for item in whole["output"]]
    assert events[0]["response"]["output"] == []
    return whole
