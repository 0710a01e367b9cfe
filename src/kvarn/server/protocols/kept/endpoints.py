"""Make, list, load and delete snapshots. A key sees its own, and restores them for its own requests only.

Everything that reads or writes files runs on one thread, so that a large file never stops the event loop. Computing
and restoring take the engine between two steps.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvarn.cache.prefix import common
from kvarn.lasting.collection import Collection, Named
from kvarn.lasting.snapshot import Facts
from kvarn.server.access import Caller
from kvarn.server.parse import checked
from kvarn.server.refusal import Refusal
from kvarn.server.request_fields import TOKENIZE, Fields
from kvarn.server.schema import Json
from kvarn.server.talk import check_opening, talk_of

if TYPE_CHECKING:
    from kvarn.server.app import Service

Result = TypeVar("Result")
_THREAD = ThreadPoolExecutor(1, "kvarn-snapshots")
_OF_TEXT = ("prompt", "messages", "tools", "chat_template_kwargs", "add_special_tokens", "model")
MAKE_FIELDS = Fields(
    {
        "name": {"type": "string", "description": "letters, digits and . _ -; a snapshot of this name is replaced"},
        **{name: TOKENIZE[name] for name in _OF_TEXT},
    },
    ("name",),
)


async def make(service: "Service", request: Request) -> Response:
    caller, kept = service.caller(request), _collection(service)
    body, tokens = await service.kept_text(request, make_call)
    name = body["name"]

    def work() -> Facts:
        plan = service.llm.cache.plan
        kept.check_room(len(tokens) * plan.bytes_per_token)
        with kept.place(caller.owner, name) as (folder, path):
            return service.llm.snapshots.save(path, tokens, salt=caller.salt, folder=folder)

    service.llm.engine.check_length(len(tokens))
    return JSONResponse(_told(name, await _run(work)))


def make_call(raw: bytes) -> dict[str, Any]:
    body = checked(raw, MAKE_FIELDS)
    if ("prompt" in body) == ("messages" in body):
        raise Refusal(400, "give prompt (a text) or messages", "prompt")
    if "messages" in body:
        body["talk"] = check_opening(body, talk_of(body))
    return body


async def listed(service: "Service", request: Request) -> Response:
    caller, kept = service.caller(request), _collection(service)
    found = await _run(lambda: kept.list(caller.owner))
    return JSONResponse({"object": "list", "data": list(map(_listed, found))})


async def shown(service: "Service", request: Request) -> Response:
    caller, kept, name = service.caller(request), _collection(service), request.path_params["id"]

    def work() -> Facts:
        with kept.open(caller.owner, name) as file:
            return file.facts

    return JSONResponse(_told(name, await _run(work)))


async def delete(service: "Service", request: Request) -> Response:
    caller, kept, name = service.caller(request), _collection(service), request.path_params["id"]
    await _run(lambda: kept.remove(caller.owner, name))
    return JSONResponse({"object": "snapshot", "name": name, "deleted": True})


async def load(service: "Service", request: Request) -> Response:
    caller, kept, name = service.caller(request), _collection(service), request.path_params["id"]
    found = await _run(lambda: _load(service, kept, caller, name))
    return JSONResponse({"object": "snapshot", "name": name, **found})


def _load(service: "Service", kept: Collection, caller: Caller, name: str) -> Json:
    with kept.open(caller.owner, name) as file:
        found = service.llm.snapshots.load_open(file, caller.salt, name)
    return {"tokens": len(found.tokens), "bytes": found.nbytes, "read_ms": round(1000 * found.seconds, 3)}


def shared_tokens(tokenize: Callable[[dict[str, Any]], list[int]], body: dict[str, Any]) -> list[int]:
    """The tokens of a text. Of a system message alone, those before the first question."""
    talk = body.get("talk")
    if talk is None or talk.messages[-1]["role"] not in ("system", "developer"):
        return tokenize(body)
    asked = (replace(talk, messages=[*talk.messages, {"role": "user", "content": text}]) for text in ("a", "b"))
    ours, other = (tokenize({**body, "talk": each}) for each in asked)
    return ours[: common(ours, other)]


async def _run(work: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work)


def _collection(service: "Service") -> Collection:
    if service.kept is None:
        raise Refusal(404, "this server keeps no snapshots: start it with --snapshot-dir DIR")
    return service.kept


def _listed(each: Named) -> Json:
    if each.facts is None:
        return {"object": "snapshot", "name": each.name, "problem": each.problem}
    return _told(each.name, each.facts)


def _told(name: str, facts: Facts) -> Json:
    known = {"tokens": facts.n_tokens, "bytes": facts.nbytes, "created": facts.created}
    return {"object": "snapshot", "name": name, **known}
