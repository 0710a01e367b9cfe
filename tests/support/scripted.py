"""A server in this process whose model writes given texts.

The last "play NAME" in the prompt says which. After a constraint has forbidden a token of the text, the model
prefers what ends the answer, or JSON.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from support import tiny_gguf
from support.serving import Reply
from support.tiny_models import GOLDEN

from kvarn import LLM
from kvarn.backends.host import HostLogits
from kvarn.server.access import Access
from kvarn.server.app import Service
from kvarn.server.metrics import Metrics
from kvarn.server.worker import Worker

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# In the shape of Hermes and Qwen. `open` begins the answer with reasoning; `enable_thinking: false` closes it.
HERMES = """\
{% if tools %}<tools>{{ tools | tojson }}</tools>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if open is defined %}<think>
{% elif enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
HERMES_CONTROL = ("<|im_start|>", "<|im_end|>")
# In the shape of Mistral: the markers are control tokens.
MISTRAL = """\
{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}
{%- elif m.role == 'assistant' %}{{ m.content }}{% else %}[INST]{{ m.content }}[/INST]{% endif %}
{%- endfor %}"""
MISTRAL_CONTROL = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]", "[OTHER]")
PLAY = re.compile(r"play (\w+)")
SCRIPT, CLOSERS = 20.0, '"}]{'  # the score of the next token of the text; what is preferred if it is forbidden
Texts = Mapping[str, str | Sequence[str]]  # by name: a text, or one for each sample. No token goes over a CUT
CUT = "\0"


def scripted_model(path: Path, template: str, control: Sequence[str] = (), context: int = 2048) -> Path:
    """A tiny model with this chat template and these control tokens."""
    keys = tiny_gguf.tokenizer_keys(template)
    tokens, kinds = keys["tokenizer.ggml.tokens"][1], keys["tokenizer.ggml.token_type"][1]
    size = replace(GOLDEN, vocab_size=len(tokens) + len(control), context=context)
    keys["tokenizer.ggml.tokens"] = ("[str", [*tokens, *control])
    keys["tokenizer.ggml.token_type"] = ("[i32", [*kinds, *(3 for _ in control)])
    return tiny_gguf.write(path, "llama", template, size, keys=keys)


def scripted_llm(model: Path, texts: Texts, **settings: Any) -> LLM:
    llm = LLM(model, **{"cache": "paged", "max_seqs": 6, "backend": "cpu"} | settings)
    play(llm, texts)
    return llm


def play(llm: LLM, texts: Texts) -> None:
    """From now on the model writes these texts."""
    tokenizer, engine = llm.tokenizer, llm.engine
    encoded = {
        name: [
            [id for piece in each.split(CUT) for id in tokenizer.encode(piece, bos=False, special=True)]
            for each in ([text] if isinstance(text, str) else text)
        ]
        for name, text in texts.items()
    }
    closers = {id: len(CLOSERS) - CLOSERS.index(c) for c in CLOSERS for id in tokenizer.encode(c, bos=False)}

    def run(memory, step, tokens, wanted) -> HostLogits:
        samples = {sample.id: sample for request in engine._requests.values() for sample in request.samples}
        rows = [samples[seq] for seq, n in zip(step.seqs, step.n_new, strict=True) for _ in range(n)]
        logits = np.zeros((len(wanted), llm.config.vocab_size), np.float32)
        for row, which in zip(logits, wanted, strict=True):
            sample = rows[which]
            (*_, name) = PLAY.findall(tokenizer.decode(sample.request.prompt)) or ["nothing"]
            scripts = encoded.get(name, [[]])
            script = scripts[sample.index % len(scripts)]
            row[tokenizer.eos_ids[0]] = 5
            for id, score in closers.items():
                row[id] = score
            n, follows = sample.n_output, sample.output == script[: sample.n_output]
            if follows and n < len(script):
                row[script[n]] = SCRIPT
            elif follows:
                row[tokenizer.eos_ids[0]] = SCRIPT
        return HostLogits(logits)

    llm.program.run = run


class Client:
    """Calls of the application, without a socket. All methods block."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.llm = service.llm
        self._app = service.app()
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self.service.start(self._loop)

    def ask(self, path: str = CHAT, leave_at: int | None = None, key: str = "", **body: Any) -> Reply:
        """`leave_at`: the client disconnects when it has got so many messages."""
        return self._loop.run_until_complete(self._ask(path, json.dumps(body).encode(), leave_at, key))

    def get(self, path: str, key: str = "") -> Reply:
        return self._loop.run_until_complete(self._ask(path, b"", None, key, "GET"))

    def delete(self, path: str, key: str = "") -> Reply:
        return self._loop.run_until_complete(self._ask(path, b"", None, key, "DELETE"))

    def together(self, calls: Sequence[dict]) -> list[Reply]:
        async def all_of() -> list[Reply]:
            asked = (self._ask(CHAT, json.dumps(body).encode(), None) for body in calls)
            return list(await asyncio.gather(*asked))

        return self._loop.run_until_complete(all_of())

    def say(self, name: str, **fields: Any) -> Reply:
        """A chat that is answered with the text of this name, greedily."""
        return self.ask(**{"messages": [{"role": "user", "content": f"play {name}"}], "temperature": 0} | fields)

    def metrics(self) -> str:
        return self.service._metrics.page()[0].decode()

    async def _ask(self, path: str, body: bytes, leave_at: int | None, key: str = "", method: str = "POST") -> Reply:
        sent: list[dict] = []
        given = [{"type": "http.request", "body": body, "more_body": False}]
        left = asyncio.Event()

        async def receive() -> dict:
            if given:
                return given.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            sent.append(message)
            if leave_at is not None and len(sent) >= leave_at:
                left.set()

        await self._app(scope_of(path, key, method), receive, send)
        head = next((m for m in sent if m["type"] == "http.response.start"), {"status": 0, "headers": []})
        headers = {name.decode().lower(): value.decode() for name, value in head["headers"]}
        return Reply(head["status"], headers, b"".join(message.get("body", b"") for message in sent))

    def until(self, reached: Callable[[], object]) -> None:
        async def poll() -> None:
            async with asyncio.timeout(60):
                while not reached():
                    await asyncio.sleep(0.001)

        self._loop.run_until_complete(poll())

    def close(self) -> None:
        async def stop() -> None:
            await asyncio.to_thread(self.service.stop)

        self._loop.run_until_complete(stop())
        self._loop.close()


@contextmanager
def serving(llm: LLM, access: Access | None = None) -> Iterator[Client]:
    """All requests must have been freed at the end."""
    metrics = Metrics(llm.engine, "tiny")
    client = Client(Service(llm, "tiny", access or Access([]), metrics, Worker(llm, metrics)))
    try:
        yield client
        client.until(lambda: not llm.engine.busy)
        llm.cache.check()
        assert llm.cache.usage().sequences == 0
    finally:
        client.close()
        llm.close()


def scope_of(path: str, key: str = "", method: str = "POST") -> dict:
    path, _, query = path.partition("?")
    return {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(b"host", b"localhost"), *([(b"x-api-key", key.encode())] if key else [])],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "scheme": "http",
        "root_path": "",
    }
