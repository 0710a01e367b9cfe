"""The endpoints that tell about the server: the model, its health, metrics, the cache, past requests. They change
nothing."""

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvarn.server.cache_map import residency
from kvarn.server.metrics import Metrics
from kvarn.server.openapi import document, overview
from kvarn.server.planning import Planning
from kvarn.server.protocols.anthropic.models import asks_for_anthropic, model_info, model_page
from kvarn.server.refusal import Refusal
from kvarn.server.routes import Endpoint

if TYPE_CHECKING:
    from kvarn.server.app import Service


class Inspection:
    """`page`: whether the server has the page at `/`."""

    def __init__(self, service: "Service", metrics: Metrics, planning: Planning, page: bool) -> None:
        self._service = service
        self._metrics = metrics
        self._planning = planning
        self._overview = overview(page)
        self._openapi = document(page)
        self.endpoints: dict[str, Endpoint] = {
            "/": self.root,
            "/v1": self.root,
            "/v1/models": self.models,
            "/v1/models/{id:path}": self.model,
            "/health": self.health,
            "/ready": self.ready,
            "/metrics": self.metrics,
            "/openapi.json": self.openapi,
            "/kvarn/cache": self.cache,
            "/kvarn/plan": self.planned,
            "/kvarn/requests": self.requests,
            "/kvarn/requests/{id:path}": self.request,
        }

    async def root(self, request: Request) -> Response:
        return JSONResponse(self._overview)

    async def models(self, request: Request) -> Response:
        self._service.caller(request)
        if asks_for_anthropic(request):
            return JSONResponse(model_page(self._model_info()))
        # Codex reads `models`: its own facts about models, of which there are none.
        return JSONResponse({"object": "list", "data": [self._model()], "models": []})

    async def model(self, request: Request) -> Response:
        self._service.caller(request)
        if request.path_params["id"].removesuffix("/") != self._service.name:
            raise self._service.no_such_model()
        return JSONResponse(self._model_info() if asks_for_anthropic(request) else self._model())

    async def health(self, request: Request) -> Response:
        if not self._service.worker.alive:
            raise Refusal(503, "the engine has failed: restart the server")
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        draining = self._service.draining
        if draining or not self._service.worker.alive:
            raise Refusal(503, "the server is stopping" if draining else "the engine has failed")
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        page, content_type = self._metrics.page(request.headers.get("accept", ""))
        return Response(page, headers={"Content-Type": content_type, "Vary": "Accept"})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self._openapi)

    async def cache(self, request: Request) -> Response:
        self._service.caller(request)
        return JSONResponse(residency(self._service.llm.cache))

    async def planned(self, request: Request) -> Response:
        self._service.caller(request)
        return JSONResponse(await asyncio.to_thread(self._planning.facts))

    async def requests(self, request: Request) -> Response:
        caller = self._service.caller(request)
        return JSONResponse({"object": "list", "data": self._service.records.recent(caller.owner)})

    async def request(self, request: Request) -> Response:
        caller, id = self._service.caller(request), request.path_params["id"]
        explanation = self._service.records.get(id, caller.owner)
        if explanation is None:
            raise Refusal(404, "this key made no such request, or it is too long ago", "id")
        return JSONResponse(explanation)

    def _model(self) -> dict[str, Any]:
        service = self._service
        facts = {"created": service.started, "owned_by": "kvarn", "max_model_len": service.llm.cache.longest}
        return {"id": service.name, "object": "model", **facts}

    def _model_info(self) -> dict[str, Any]:
        return model_info(self._service.name, self._service.started, self._service.llm.cache.longest)
