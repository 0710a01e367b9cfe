"""vLLM's render endpoints: what a request would compute, without computing it."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvarn.server.ignored import headers
from kvarn.server.parse import Call
from kvarn.server.protocols.base import Serve
from kvarn.server.protocols.openai.calls import chat_call
from kvarn.server.request_log import entry_of
from kvarn.server.schema import Json

if TYPE_CHECKING:
    from kvarn.server.app import Service

SHOWN = (
    *("n", "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs"),
)


async def count(service: "Service", request: Request) -> Response:
    """How many tokens the prompt of a chat has."""
    service.caller(request)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": await service.count(request, chat_call)})


def render(parse: Callable[[bytes], Call], one: bool = False) -> Serve:
    """`one`: the answer is an object, because there is one prompt; otherwise it is a list."""

    async def serve(service: "Service", request: Request) -> Response:
        call, planned = await service.plan(request, parse, service.caller(request))
        entry = entry_of(request.scope)
        rendered: list[Json] = []
        for each in planned.submissions:
            params = asdict(each.params)
            rendered.append(
                {
                    "request_id": entry.id,
                    "token_ids": each.prompt,
                    "prompt": service.llm.tokenizer.decode(each.prompt, special=True),
                    "sampling_params": {name: params[name] for name in SHOWN},
                    "model": service.name,
                    "stream": call.stream,
                }
            )
        return JSONResponse(rendered[0] if one else rendered, headers=headers(planned.ignored))

    return serve
