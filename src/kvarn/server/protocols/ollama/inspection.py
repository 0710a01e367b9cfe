"""Ollama's endpoints about models: there is one, it is loaded, and it cannot be changed."""

from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvarn import __version__
from kvarn.server.parse import checked
from kvarn.server.protocols.ollama.calls import LATEST
from kvarn.server.protocols.ollama.fields import SHOW_FIELDS
from kvarn.server.refusal import Refusal
from kvarn.server.schema import Json

if TYPE_CHECKING:
    from kvarn.server.app import Service

API_VERSION = "0.12.6"  # of Ollama, whose API this is: clients ask for a least version
FOREVER = timedelta(days=36_500)
THINKING = ("<think>", "enable_thinking", "reasoning_content", "reasoning_effort")  # in the source of a template


async def version(service: "Service", request: Request) -> Response:
    return JSONResponse({"version": API_VERSION, "kvarn": __version__})


async def tags(service: "Service", request: Request) -> Response:
    service.caller(request)
    return JSONResponse({"models": [_model(service)]})


async def ps(service: "Service", request: Request) -> Response:
    service.caller(request)
    expires = (datetime.now(UTC) + FOREVER).isoformat()
    loaded = {"expires_at": expires, "size_vram": 0, "context_length": service.llm.cache.longest}
    return JSONResponse({"models": [_model(service) | loaded]})


async def show(service: "Service", request: Request) -> Response:
    service.caller(request)
    body = await service.read(request, lambda raw: checked(raw, SHOW_FIELDS))
    name = body.get("model", body.get("name"))
    if name is None:
        raise Refusal(400, "model is missing", "model")
    service.check_model(name.removesuffix(LATEST))
    config, tokenizer = service.llm.config, service.llm.tokenizer
    family, defaults = config.architecture, service.llm.chat_defaults
    return JSONResponse(
        {
            "modelfile": f"# served by kvarn {__version__}\nFROM {service.llm.path.name}\n",
            "parameters": "\n".join(f"{name} {value}" for name, value in sorted(defaults.items()) if value is not None),
            "template": tokenizer.chat_template or "",
            "details": _details(service),
            "model_info": {
                "general.architecture": family,
                "general.basename": config.name,
                f"{family}.context_length": service.llm.cache.longest,
                f"{family}.embedding_length": config.hidden,
                f"{family}.block_count": config.n_layers,
                f"{family}.attention.head_count": config.n_heads,
                f"{family}.attention.head_count_kv": config.n_kv_heads,
                f"{family}.feed_forward_length": config.feed_forward,
                f"{family}.vocab_size": config.vocab_size,
            },
            "capabilities": _capabilities(service),
            "modified_at": _modified(service),
        }
    )


async def refuse(service: "Service", request: Request) -> Response:
    service.caller(request)
    message = f"{request.url.path} is not implemented: kvarn serves the model that it was started with"
    raise Refusal(400, message, code="not_implemented")


def _capabilities(service: "Service") -> list[str]:
    tokenizer = service.llm.tokenizer
    source = tokenizer.chat_template or ""
    found = {
        "completion": True,
        "tools": bool(source),
        "thinking": any(word in source for word in THINKING),
        "insert": tokenizer.markers is not None,
        "embedding": True,
    }
    return [name for name, has in found.items() if has]


def _model(service: "Service") -> Json:
    path = service.llm.path
    files = [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]
    return {
        "name": service.name,
        "model": service.name,
        "modified_at": _modified(service),
        "size": sum(each.stat().st_size for each in files),
        "digest": sha256(service.fingerprint.encode()).hexdigest(),
        "details": _details(service),
    }


def _details(service: "Service") -> Json:
    family = service.llm.config.architecture
    form = "gguf" if service.llm.path.is_file() else "safetensors"
    unknown = {"parent_model": "", "parameter_size": "", "quantization_level": ""}
    return {"format": form, "family": family, "families": [family], **unknown}


def _modified(service: "Service") -> str:
    return datetime.fromtimestamp(service.llm.path.stat().st_mtime, UTC).isoformat()
