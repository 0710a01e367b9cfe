"""The page at `/`: its files, and the endpoints that it reads. docs/page.md describes what one sees.

A key sees the text of its own blocks only, and the numbers of all.
"""

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvarn import __version__
from kvarn.server.access import Caller
from kvarn.server.openapi import overview
from kvarn.server.page.lanes import Lane, earlier
from kvarn.server.page.live import MEDIA_TYPE, PERIOD, Live, Stream
from kvarn.server.page.state import MOST_LANES, State
from kvarn.server.page.static import Static, wants_page
from kvarn.server.refusal import Refusal
from kvarn.server.routes import Endpoint

if TYPE_CHECKING:
    from kvarn.server.app import Service

MOST_TEXTS = 256  # blocks of one request


class Page:
    def __init__(self, service: "Service") -> None:
        self._service = service
        self._static = Static()
        self._live = Live(service.worker, State(_facts(service), len(service.llm.cache.plan.groups)))
        self.endpoints: dict[str, Endpoint] = {
            "/": self.root,
            "/kvarn/page/{name}": self.file,
            "/kvarn/live": self.live,
            "/kvarn/cache/texts": self.texts,
        }

    def close(self) -> None:
        self._live.close()

    async def root(self, request: Request) -> Response:
        if wants_page(request.headers.get("accept", "")):
            return self._static.answer(request)
        return JSONResponse(overview(page=True), headers={"Vary": "Accept"})

    async def file(self, request: Request) -> Response:
        return self._static.answer(request, request.path_params["name"])

    async def live(self, request: Request) -> Response:
        caller = self._service.caller(request)
        if request.method == "HEAD":
            return Response(media_type=MEDIA_TYPE)
        return Stream(self._live, caller, lambda: self._past(caller), self._service.reader_seconds)

    async def texts(self, request: Request) -> Response:
        caller, query = self._service.caller(request), request.query_params
        cache = self._service.llm.cache
        group = _number(query.get("group", "0"), "group", len(cache.plan.groups))
        named = query.get("blocks", "").split(",")
        if len(named) > MOST_TEXTS:
            raise Refusal(400, f"blocks names {len(named):,} blocks: ask for {MOST_TEXTS} at most", "blocks")
        blocks = [_number(each, "blocks", cache.plan.groups[group].config.n_blocks) for each in named]
        found = cache.watching.content(group, blocks, caller.salt) if caller.quotes else {}
        spell = self._service.prompts.spell
        return JSONResponse({"texts": {str(block): spell(tokens) for block, tokens in found.items()}})

    def _past(self, caller: Caller) -> list[Lane]:
        """Requests that ended before, oldest first: the caller's own and those without a key."""
        owners, records = {caller.owner, b""}, self._service.records
        found = [(owner, *each) for owner in owners for each in records.ended(owner, MOST_LANES)]
        newest = sorted(found, key=lambda each: each[1])[-MOST_LANES:]
        return [earlier(what, n - len(newest), owner, when) for n, (owner, when, what) in enumerate(newest)]


def _facts(service: "Service") -> dict[str, Any]:
    llm, plan = service.llm, service.llm.cache.plan
    return {
        "version": __version__,
        "server": service.fingerprint,
        "started": service.started,
        "period": PERIOD,
        "model": service.name,
        "chat": llm.tokenizer.chat_template is not None,
        "strategy": plan.strategy.name,
        "layout": plan.layout.name,
        "codec": plan.codec.name,
        "bytes": plan.nbytes,
        "bytes_per_token": plan.bytes_per_token,
        "context": llm.cache.longest,
        "sequences": plan.max_seqs,
        "shares": llm.cache.shares,
        "groups": [
            {
                "layers": len(group.layers),
                "window": group.config.spec.window,
                "block_size": group.config.block_size,
                "blocks": group.config.n_blocks,
            }
            for group in plan.groups
        ],
    }


def _number(text: str, field: str, end: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) < end):
        raise Refusal(400, f"{field} must have whole numbers below {end:,}", field)
    return int(text)
