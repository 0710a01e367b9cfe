"""llama.cpp's endpoints about the server: /props, /slots, /apply-template and /v1/health. Nothing can be changed."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvarn import __version__
from kvarn.engine.params import SamplingParams
from kvarn.engine.request import Sample
from kvarn.server.parse import checked
from kvarn.server.protocols.llamacpp.fields import TEMPLATE
from kvarn.server.protocols.llamacpp.settings import generation_settings
from kvarn.server.refusal import Refusal
from kvarn.server.schema import Json
from kvarn.server.talk import Talk, talk_of

if TYPE_CHECKING:
    from kvarn.server.app import Service


async def props(service: "Service", request: Request) -> Response:
    service.caller(request)
    llm, tokenizer = service.llm, service.llm.tokenizer
    params = llm.for_chat(SamplingParams())
    defaults = {
        **_slot(service, 0, None),
        "params": generation_settings(params, llm.cache.longest, True, None),
        "prompt": "",
    }
    return JSONResponse(
        {
            "default_generation_settings": defaults,
            "total_slots": llm.cache.plan.max_seqs,
            "model_alias": service.name,
            "model_path": llm.path.name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": tokenizer.chat_template or "",
            "chat_template_caps": {},
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "build_info": f"kvarn-{__version__}",
            "is_sleeping": False,
        }
    )


async def slots(service: "Service", request: Request) -> Response:
    """One for each sequence that can be computed at the same time. No texts: they may be another key's."""
    service.caller(request)
    running = list(service.worker.engine.scheduler.running)
    n = service.llm.cache.plan.max_seqs
    if request.query_params.get("fail_on_no_slot") and len(running) >= n:
        raise Refusal(503, "no slot is free: try again later", retry_after=1)
    return JSONResponse([_slot(service, i, running[i] if i < len(running) else None) for i in range(n)])


def _slot(service: "Service", id: int, sample: Sample | None) -> Json:
    n_decoded = 0 if sample is None else sample.n_output
    limit = -1 if sample is None else sample.request.params.max_tokens or -1
    return {
        "id": id,
        "id_task": -1 if sample is None else sample.request.id,
        "n_ctx": service.llm.cache.longest,
        "speculative": False,
        "is_processing": sample is not None,
        "n_prompt_tokens": 0 if sample is None else len(sample.request.prompt),
        "n_prompt_tokens_processed": 0 if sample is None else min(sample.computed, len(sample.request.prompt)),
        "next_token": {
            "has_next_token": sample is not None,
            "n_remain": limit - n_decoded if limit >= 0 else -1,
            "n_decoded": n_decoded,
        },
    }


async def apply_template(service: "Service", request: Request) -> Response:
    service.caller(request)
    _, text = await service.rendered(request, _template_call)
    return JSONResponse({"prompt": text})


def _template_call(raw: bytes) -> tuple[Talk, bool]:
    body: dict[str, Any] = checked(raw, TEMPLATE)
    talk, opens = talk_of(body), body.get("add_generation_prompt", True)
    if not opens and "continue_final_message" not in body:
        talk = replace(talk, continues=False)
    return talk, opens


async def health(service: "Service", request: Request) -> Response:
    return await service.inspection.health(request)
