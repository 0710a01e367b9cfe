"""The HTTP endpoints: they parse a request, call the engine's thread or the cache, and format the answer."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from kvarn.chats.answer import Reader
from kvarn.chats.rules import Rule
from kvarn.engine.params import SamplingParams
from kvarn.lasting.collection import Collection
from kvarn.llm import LLM
from kvarn.server.access import Access, Caller
from kvarn.server.bodies import BODY_SECONDS, Bodies
from kvarn.server.call import Answer, Generation
from kvarn.server.diagnostics import compare
from kvarn.server.explaining import Explaining
from kvarn.server.faults import fault
from kvarn.server.fingerprint import fingerprint_of
from kvarn.server.ignored import Ignored
from kvarn.server.inspection import Inspection
from kvarn.server.metrics import Metrics
from kvarn.server.origin import OriginCheck, Sites
from kvarn.server.outlines import Outline, outline_of
from kvarn.server.page import Page
from kvarn.server.parse import Call, detokenize_call, tokenize_call
from kvarn.server.planning import Planning
from kvarn.server.prompts import Prompts
from kvarn.server.protocols import PROTOCOLS
from kvarn.server.protocols.base import Reply, Setting
from kvarn.server.protocols.kept.endpoints import shared_tokens
from kvarn.server.protocols.responses.store import Responses
from kvarn.server.records import Records
from kvarn.server.refusal import Refusal
from kvarn.server.request_id import HEADER, Identified
from kvarn.server.request_log import RequestLog, entry_of
from kvarn.server.routes import Bound, Endpoint, application
from kvarn.server.structures import Structures
from kvarn.server.talk import Talk
from kvarn.server.worker import Submission, Worker

READER_SECONDS = 60.0  # if a client does not read for this time, its request is cancelled


class Planned(NamedTuple):
    """What is done for a call. `reader` makes the reader of an answer. `rule`: that all answers follow; it is not
    compiled yet. `notes`: what the answer's `kvarn` says besides the explanation."""

    submissions: list[Submission]
    reader: Callable[[], Reader]
    ignored: list[Ignored]
    rule: Rule | None
    notes: Mapping[str, Any] = {}
    outline: Outline | None = None  # of a chat


class Service:
    """`name`: the model's name in answers. `strict_model`: refuse requests for a model of another name."""

    def __init__(
        self,
        llm: LLM,
        name: str,
        access: Access,
        metrics: Metrics,
        worker: Worker,
        reader_seconds: float = READER_SECONDS,
        body_seconds: float = BODY_SECONDS,
        sites: Sites | None = None,
        log: RequestLog | None = None,
        strict_model: bool = False,
        planning: Planning | None = None,
        kept: Collection | None = None,
        page: bool = True,
    ) -> None:
        self.llm = llm
        self.log = log or RequestLog()
        self.name = name
        self.worker = worker
        self.draining = False
        self.kept = kept  # snapshots by name
        self._access = access
        self._metrics = metrics
        self.reader_seconds = reader_seconds
        self._bodies = Bodies(body_seconds)
        self._sites = sites or Sites()
        self.responses = Responses()
        self.records = Records()
        self.prompts = Prompts(llm)
        self._structures = Structures(lambda: llm.runner.compiler)
        self._strict_model = strict_model
        self.fingerprint = fingerprint_of(llm)
        self.started = int(time.time())
        self.inspection = Inspection(self, metrics, planning or Planning(llm), page)
        self._page = Page(self) if page else None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.worker.start(loop)
        self.prompts.start()

    def drain(self) -> None:
        """Accept no more requests for text, and end the streams that would not end by themselves."""
        self.draining = True
        if self._page is not None:
            self._page.close()

    def stop(self) -> None:
        """Cancel all requests and end the engine's thread."""
        self.prompts.close()
        self._structures.close()
        self.worker.stop()

    def store(self) -> None:
        """After `stop`: give everything that is resident to the tiers, for the next start."""
        if done := self.llm.runner.drain():
            self.log.stored(done)

    def app(self) -> ASGIApp:
        get = dict(self.inspection.endpoints)
        post: dict[str, Endpoint] = {
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        if self._page is not None:
            get |= self._page.endpoints
        bound = [Bound("GET", path, endpoint) for path, endpoint in get.items()]
        bound += [Bound("POST", path, endpoint) for path, endpoint in post.items()]
        for protocol in PROTOCOLS:
            for each in protocol.addresses:
                bound.append(Bound(each.method, each.path, partial(each.serve, self), protocol.error))
        return Identified(OriginCheck(application(bound), self._sites), self.log)

    # -- text ----------------------------------------------------------------------------------------------------

    async def generate(
        self, request: Request, parse: Callable[[bytes], Call], reply: Callable[[Setting, Call], Reply]
    ) -> Response:
        """The answer to a request for text, in any protocol."""
        caller, entry = self.caller(request), entry_of(request.scope)
        call, planned = await self.plan(request, parse, caller)
        constrain = await self._structures.constrain(planned.rule, call.structure_field or "tools")
        self._metrics.ignored(planned.ignored)
        entry.model = self.name
        if call.request_id is not None and HEADER not in request.headers:
            entry.id = call.request_id
        submissions = [
            submission._replace(constrain=constrain, owner=caller.owner, request_id=entry.id)
            for submission in planned.submissions
        ]
        if self.log.texts:
            entry.prompts = [self.prompts.excerpt(submission.prompt) for submission in submissions]
        generation = Generation(
            self.worker,
            reply(self._setting(call, caller, planned), call),
            call,
            entry,
            planned.reader,
            planned.ignored,
            Explaining(self.records, caller, self.prompts, call, planned.outline),
            planned.notes,
        )
        try:
            await generation.start(submissions)
        except Exception as error:  # noqa: BLE001 (reported to the caller)
            raise fault(error, self._retry_after()) from None
        return Answer(generation, call.stream, self.reader_seconds)

    async def plan(self, request: Request, parse: Callable[[bytes], Call], caller: Caller) -> tuple[Call, Planned]:
        """A request for text that is checked and tokenized, and not started."""
        return await self._bodies.process(request, parse, partial(self._planned, caller), self._threads)

    async def count(self, request: Request, parse: Callable[[bytes], Call]) -> int:
        """How many tokens the prompt of a chat has. Clients count to find out whether it fits, so it may be longer than
        the context."""
        return (await self._bodies.process(request, parse, self._counted, self._threads))[1]

    def _counted(self, call: Call) -> int:
        self.check_model(call.model)
        assert call.talk is not None
        return len(self.prompts.chat(call, call.talk).prepared.tokens)

    def _setting(self, call: Call, caller: Caller, planned: Planned) -> Setting:
        cache, compared, outline = self.llm.cache, call.compared, planned.outline
        then = None if compared is None else self.records.outline(compared, caller.owner)
        return Setting(
            self.name,
            self.llm.tokenizer.token_bytes,
            self.fingerprint,
            prompts=[submission.prompt for submission in planned.submissions],
            params=planned.submissions[0].params if planned.submissions else SamplingParams(),
            shared_block=cache.placements[0].block_size if cache.shares else 0,
            comparison=None if compared is None or outline is None else compare(outline, then),
            spell=self.prompts.spell,
            context=cache.longest,
            width=self.llm.config.hidden,
        )

    def _threads(self, call: Call) -> Executor | None:
        """Those that may wait for templates; None: asyncio's."""
        return self.prompts.threads if call.chat else None

    def _planned(self, caller: Caller, call: Call) -> Planned:
        self.check_model(call.model)
        if self.draining:
            raise Refusal(503, "the server is stopping: try another one, or later", retry_after=self._retry_after())
        salt = caller.salted(call.cache_salt)
        submit = partial(self._submission, call=call, salt=salt)
        if call.talk is not None:
            chat, unused, notes = self.prompts.chat(call, call.talk)
            submission = submit(chat.tokens, shown=chat.shown)
            outline = outline_of(call.talk, salt)
            return Planned([submission], chat.reader, [*call.ignored, *unused], chat.rule, notes, outline)
        rule = None if call.structure is None else Rule(call.structure)
        if call.suffix is not None:
            gaps = [self.prompts.with_gap(prompt, call.suffix, call) for prompt in call.prompts]
            unfit = [each for _, told in gaps for each in told]
            return Planned([submit(tokens) for tokens, _ in gaps], Reader, [*call.ignored, *unfit], rule)
        echoed = self.prompts.echoed if call.echo else lambda prompt, tokens: ""
        prompts = ((prompt, self.prompts.plain(prompt, call)) for prompt in call.prompts)
        submissions = [submit(tokens, echo=echoed(prompt, tokens)) for prompt, tokens in prompts]
        return Planned(submissions, Reader, call.ignored, rule)

    def _submission(
        self,
        prompt: list[int],
        call: Call,
        salt: bytes,
        echo: str = "",
        shown: frozenset[int] = frozenset(),
    ) -> Submission:
        self.prompts.check_length(len(prompt))
        context = self.llm.cache.longest
        room, max_tokens = context - len(prompt), call.max_tokens
        if max_tokens is None:
            max_tokens = room if call.default_tokens is None else min(call.default_tokens, room)
        elif room < max_tokens:
            raise Refusal(
                400,
                f"the prompt has {len(prompt):,} tokens and max_tokens is {max_tokens}: together more than this "
                f"server's context of {context:,} tokens; lower max_tokens to {room} or leave it out",
                "max_tokens",
                "context_length_exceeded",
            )
        settings = call.settings
        if call.suffix is not None and (markers := self.llm.tokenizer.markers) is not None:
            settings = settings | {"stop_token_ids": (*settings["stop_token_ids"], *markers.ends)}
        if call.biased_texts:
            settings = settings | {"logit_bias": self.prompts.biases(call) | settings["logit_bias"]}
        params = self.llm.for_chat(SamplingParams(max_tokens=max_tokens, **settings))
        return Submission(
            prompt,
            params,
            salt,
            call.cache_priority,
            call.stream,
            echo,
            shown=shown,
            timed=call.timed,
            watched=call.watched and call.stream,
            echoed_logprobs=call.echo and settings["logprobs"] is not None,
            pooling=None if call.pooling is None else call.pooling or self.llm.pooling,
        )

    async def tokenize(self, request: Request) -> Response:
        self.caller(request)
        body, tokens = await self._bodies.process(
            request,
            tokenize_call,
            self._tokens,
            lambda body: self.prompts.threads if "talk" in body else None,
        )
        told = self._pieces(tokens) if body.get("with_pieces") else tokens
        return JSONResponse({"tokens": told, "count": len(tokens), "max_model_len": self.llm.cache.longest})

    async def detokenize(self, request: Request) -> Response:
        self.caller(request)
        _, text = await self._bodies.process(request, detokenize_call, self._text)
        return JSONResponse({"prompt": text, "content": text})

    async def rendered(
        self, request: Request, parse: Callable[[bytes], tuple[Talk, bool]]
    ) -> tuple[tuple[Talk, bool], str]:
        """The text of a conversation's prompt, with or without the beginning of the answer."""
        render = lambda parsed: self.prompts.rendered(*parsed)  # noqa: E731
        return await self._bodies.process(request, parse, render, lambda parsed: self.prompts.threads)

    async def kept_text(
        self, request: Request, parse: Callable[[bytes], dict[str, Any]]
    ) -> tuple[dict[str, Any], list[int]]:
        """The text of a snapshot, in tokens."""
        tokens = lambda body: shared_tokens(self._tokens, body)  # noqa: E731
        return await self._bodies.process(request, parse, tokens, lambda body: self.prompts.threads)

    async def read(self, request: Request, parse: Callable[[bytes], dict[str, Any]]) -> dict[str, Any]:
        """A body that asks for nothing to be computed."""
        return (await self._bodies.process(request, parse, lambda body: None))[0]

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        self.check_model(body.get("model"))
        return self.prompts.tokenize(body)

    def _pieces(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """llama.cpp's form of tokens with their texts: bytes, if they are no text alone."""
        return [{"id": token, "piece": as_piece(self.llm.tokenizer.token_bytes(token))} for token in tokens]

    def _text(self, body: dict[str, Any]) -> str:
        self.check_model(body.get("model"))
        return self.prompts.text([int(token) for token in body["tokens"]])

    # -- inside --------------------------------------------------------------------------------------------------

    def caller(self, request: Request) -> Caller:
        caller = self._access.caller(request.headers.get("authorization"), request.headers.get("x-api-key"))
        entry_of(request.scope).key = caller.name
        return caller

    def check_model(self, name: str | None) -> None:
        if self._strict_model and name is not None and name != self.name:
            raise self.no_such_model()

    def no_such_model(self) -> Refusal:
        return Refusal(404, f"this server has the model {self.name}, no other", "model", "model_not_found")

    def _retry_after(self) -> int:
        """Estimated seconds until the queue has room, from the mean time of past requests."""
        engine = self.worker.engine
        stats, waiting = engine.stats, len(engine.scheduler.waiting)
        each = stats.request_seconds / max(stats.finished, 1)
        return min(max(math.ceil(each * (waiting + 1) / self.llm.cache.plan.max_seqs), 1), 60)


def as_piece(raw: bytes) -> str | list[int]:
    """A token's bytes as text, or as numbers if they are not UTF-8 alone."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
