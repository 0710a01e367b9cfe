"""The server's parts in one process: clients that do not read, steps that fail, an engine that dies."""

import asyncio
import itertools
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import tiny, tiny_gguf
from support.null_backend import Null
from support.serving import tiny_model
from support.tiny_models import GOLDEN

from kvarn import LLM, SamplingParams
from kvarn.errors import KvarnError
from kvarn.server.access import Access
from kvarn.server.app import Service
from kvarn.server.inbox import Inbox
from kvarn.server.metrics import Metrics
from kvarn.server.worker import Submission, Worker

SHORT = {"prompt": "something short", "max_tokens": 4, "temperature": 0}
POISON = 33  # "!"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 512)


def service_of(model: Path, reader_seconds: float = 60, body_seconds: float = 60) -> Service:
    llm = LLM(model, cache="paged", max_seqs=6, max_batch_tokens=64, backend="cpu" if tiny.computing else Null())
    metrics = Metrics(llm.engine, "tiny")
    return Service(llm, "tiny", Access([]), metrics, Worker(llm, metrics), reader_seconds, body_seconds)


def held_from(service: Service, step: int) -> threading.Event:
    """The engine stops inside this step and goes on when the event is set: an answer that is not finished before."""
    program, run, steps, go = service.llm.program, service.llm.program.run, itertools.count(), threading.Event()

    def held(*arguments):
        if next(steps) == step:
            assert go.wait(60), "the test did not let the engine go on"
        return run(*arguments)

    program.run = held
    return go


async def until(reached: Callable[[], object]) -> None:
    """Poll until it holds; fails after a minute."""
    async with asyncio.timeout(60):
        while not reached():
            await asyncio.sleep(0.001)


def during(service: Service, play: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        service.start(asyncio.get_running_loop())
        try:
            await play()
        finally:
            await asyncio.to_thread(service.stop)

    asyncio.run(main())
    if service.worker.fault is None:
        service.llm.cache.check()
        assert service.llm.cache.usage().sequences == 0


async def call(
    service: Service, body: dict, send: Callable[[dict], Awaitable[None]] | None = None, whole: bool = True
) -> tuple[int, Any]:
    """One request through the application, without a socket. Not `whole`: its body stops half-way."""
    sent: list[dict] = []
    given = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": not whole}]

    async def receive() -> dict:
        if given:
            return given.pop()
        await asyncio.Event().wait()  # the caller stays
        raise AssertionError

    async def keep(message: dict) -> None:
        sent.append(message)

    await service.app()(scope_of("POST", "/v1/completions"), receive, send or keep)
    text = b"".join(message.get("body", b"") for message in sent).decode()
    status = sent[0]["status"] if sent else 0
    return status, text if body.get("stream") else json.loads(text or "null")


async def look(service: Service, path: str) -> Any:
    sent: list[bytes] = []

    async def receive() -> dict:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def keep(message: dict) -> None:
        sent.append(message.get("body", b""))

    await service.app()(scope_of("GET", path), receive, keep)
    return json.loads(b"".join(sent))


def scope_of(method: str, path: str) -> dict:
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    return scope | {"headers": [], "http_version": "1.1", "scheme": "http", "server": ("x", 80), "client": ("x", 1)}


@pytest.mark.any_backend
def test_the_request_of_a_client_that_does_not_read_is_cancelled(model: Path) -> None:
    service = service_of(model, reader_seconds=0.05)
    go = held_from(service, 20)
    stuck: list[dict] = []

    async def never(message: dict) -> None:
        stuck.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def play() -> None:
        await call(service, SHORT | {"stream": True, "max_tokens": 300, "ignore_eos": True}, never)
        go.set()
        status, answer = await call(service, SHORT)
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 4

    during(service, play)
    assert len(stuck) == 2, "the head and the one piece that was not read"
    assert service.llm.engine.stats.generated_tokens < 300


@pytest.mark.any_backend
@pytest.mark.parametrize("turns", range(6))
def test_a_call_that_is_cancelled_as_a_piece_is_sent_ends(model: Path, turns: int) -> None:
    """In whatever order the end of a send and the end of the call come: a cancellation that is lost never ends."""
    service = service_of(model)
    go = held_from(service, 20)  # still under way when it is cancelled

    async def play() -> None:
        pieces: list[dict] = []
        loop = asyncio.get_running_loop()

        def cancel_in(turns: int) -> None:
            loop.call_soon(cancel_in, turns - 1) if turns else calling.cancel()

        async def take(message: dict) -> None:
            pieces.append(message)
            if len(pieces) == 2:  # the head and the first text; what follows may come in one piece
                cancel_in(turns)

        calling = asyncio.ensure_future(call(service, SHORT | {"stream": True, "max_tokens": 400}, take))
        ended, _ = await asyncio.wait({calling}, timeout=60)
        go.set()
        assert ended
        assert calling.cancelled()

    during(service, play)


@pytest.mark.any_backend
def test_a_body_that_does_not_arrive_is_refused_in_time(model: Path) -> None:
    service = service_of(model, body_seconds=0.05)

    async def play() -> None:
        status, answer = await call(service, SHORT, whole=False)
        assert status == 408
        assert answer["error"]["message"] == "the body did not arrive within 0.05 s"

    during(service, play)


@pytest.mark.any_backend
def test_a_slow_reader_gets_everything_in_fewer_pieces(model: Path) -> None:
    """While it does not read, pieces are joined: what waits for it is never more than the answer."""
    service = service_of(model)
    pieces: list[str] = []

    async def slow(message: dict) -> None:
        if message["type"] == "http.response.body":
            pieces.append(message["body"].decode())
            await until(lambda: service.llm.engine.stats.finished)  # the whole answer is computed meanwhile

    body = SHORT | {"max_tokens": 200, "ignore_eos": True, "logprobs": 1}

    async def play() -> None:
        await call(service, body | {"stream": True}, slow)
        _, whole = await call(service, body)
        events = [json.loads(piece[6:]) for piece in pieces if piece.startswith("data: {")]
        choices = [event["choices"][0] for event in events if event["choices"]]
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
        tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
        assert tokens == whole["choices"][0]["logprobs"]["tokens"]
        assert len(choices) < 10

    during(service, play)


def poisoned(service: Service) -> None:
    program, run = service.llm.program, service.llm.program.run

    def fail(memory, step, tokens, wanted):
        if POISON in tokens:
            raise RuntimeError("a kernel failed")
        return run(memory, step, tokens, wanted)

    program.run = fail


def test_a_fault_fails_one_request_only(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    service = service_of(model)
    poisoned(service)
    bodies = [SHORT | {"prompt": f"number {i}{'!' if i == 3 else ''}", "max_tokens": 20} for i in range(6)]
    bodies = [body | {"logit_bias": {str(POISON): -100}} for body in bodies]

    async def play() -> None:
        alone = [(await call(service, body))[1] for body in bodies]
        together = await asyncio.gather(*(call(service, body) for body in bodies))
        streamed = await asyncio.gather(*(call(service, body | {"stream": True}) for body in bodies))
        for i, ((status, answer), (_, text)) in enumerate(zip(together, streamed, strict=True)):
            if i == 3:
                assert status == 500
                assert answer["error"]["message"] == "the request failed: internal error of the server (RuntimeError)"
                assert '"type": "server_error"' in text
                assert "[DONE]" not in text
            else:
                assert status == 200
                assert answer["choices"] == alone[i]["choices"]
                assert text.rstrip().endswith("[DONE]")
        assert service.worker.alive

    during(service, play)
    page = service.worker.metrics.page()[0].decode()
    assert 'request_success_total{engine="0",finished_reason="error",model_name="tiny"} 3.0' in page
    assert "a step failed: RuntimeError: a kernel failed" in caplog.text


@pytest.mark.any_backend
def test_when_the_engine_dies_every_call_ends(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    service = service_of(model)
    go, submit, submitted = held_from(service, 5), service.worker.submit, []

    def noted(*arguments):
        ticket = submit(*arguments)
        submitted.append(ticket)
        if len(submitted) == 2:  # both calls are under way
            go.set()
        return ticket

    service.worker.submit = noted

    def broken() -> list:
        raise MemoryError("gone")

    service.llm.engine.isolate = lambda error: broken()  # the last resort fails too
    poisoned(service)

    async def play() -> None:
        bad, good = SHORT | {"prompt": "!"}, SHORT | {"max_tokens": 400}
        answers = await asyncio.gather(call(service, good), call(service, bad))
        assert [status for status, _ in answers] == [503, 503]
        status, answer = await call(service, SHORT)
        assert (status, answer["error"]["message"]) == (503, "the engine has failed: the server must be started again")
        assert not service.worker.alive

    during(service, play)
    assert "the engine has failed: MemoryError: gone" in caplog.text
    assert service.log.n_open == 0, "the log waits for no request that will never end"


def test_ids_without_text_are_refused_and_other_requests_go_on(tmp_path: Path) -> None:
    """A model may have more rows than its tokenizer has tokens."""
    size = replace(GOLDEN, vocab_size=GOLDEN.vocab_size + 8, context=512)
    service = service_of(tiny_gguf.write(tmp_path / "tiny.gguf", "llama", tiny_gguf.CHAT, size))
    beyond = service.llm.tokenizer.vocab_size
    assert beyond < service.llm.config.vocab_size
    with pytest.raises(KvarnError, match="outside the vocabulary"):
        service.llm.generate([[65, beyond]])
    assert not service.llm.engine.busy

    async def play() -> None:
        for prompt in ([65, beyond], [beyond, 65], [65] * 20 + [beyond] + [65] * 20):
            status, answer = await call(service, SHORT | {"prompt": prompt})
            assert (status, answer["error"]["param"]) == (400, "prompt")
        order = Submission([65, beyond], SamplingParams(max_tokens=2), b"", 0, False)  # past the first check
        inbox = Inbox(1)
        service.worker.submit(order, inbox)
        with pytest.raises(KvarnError, match="outside the vocabulary"):
            await inbox.accepted()
        assert (await call(service, SHORT | {"prompt": [65] * 20 + [66] * 21}))[0] == 200

    during(service, play)
    assert service.worker.fault is None


def test_a_stop_string_in_the_last_token_is_a_stop(model: Path) -> None:
    service = service_of(model)

    async def play() -> None:
        for max_tokens, reason in ((3, "length"), (4, "stop"), (5, "stop")):
            body = SHORT | {"logit_bias": {"97": 100}, "stop": "aaaa", "max_tokens": max_tokens}
            (choice,) = (await call(service, body))[1]["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("aaa" if max_tokens == 3 else "", reason)

    during(service, play)


@pytest.mark.any_backend
def test_a_call_that_is_left_after_its_last_token_is_explained(model: Path) -> None:
    service = service_of(model)

    async def play() -> None:
        async def stuck(message: dict) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        calling = asyncio.ensure_future(call(service, SHORT | {"stream": True}, stuck))
        await until(lambda: service.worker.engine.stats.finished)
        await call(service, SHORT | {"prompt": "another"})  # updates are in order: the first call has all of its own
        calling.cancel()
        await asyncio.wait({calling})
        n_prompt = len(service.llm.tokenizer.encode(SHORT["prompt"]))
        records = (await look(service, "/kvarn/requests"))["data"]
        assert [record["cancelled"] for record in records if record["prompt_tokens"] == n_prompt] == [False]

    during(service, play)


def test_an_llm_that_serves_can_be_used_beside_it(model: Path) -> None:
    """Any thread may step for the others; text that one of them computed also reaches the event loop."""
    service = service_of(model)
    prompts = [f"number {i}" for i in range(8)]
    params = SamplingParams(max_tokens=30)
    expected = [service.llm.generate(prompt, params)[0].text for prompt in prompts]

    async def served(prompt: str, stream: bool) -> str:
        status, answer = await call(service, {"prompt": prompt, "max_tokens": 30, "temperature": 0, "stream": stream})
        assert status == 200
        if not stream:
            return answer["choices"][0]["text"]
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        return "".join(event["choices"][0]["text"] for event in events if event["choices"])

    async def play() -> None:
        for _ in range(5):
            beside = [asyncio.to_thread(service.llm.generate, prompt, params) for prompt in prompts[:4]]
            answers = [served(prompt, i % 2 == 0) for i, prompt in enumerate(prompts[4:])]
            ours, theirs = await asyncio.wait_for(asyncio.gather(asyncio.gather(*beside), asyncio.gather(*answers)), 60)
            assert [output.text for (output,) in ours] == expected[:4]
            assert theirs == expected[4:]

    during(service, play)


@pytest.mark.any_backend
def test_a_library_user_gets_no_log(model: Path, capfd: pytest.CaptureFixture) -> None:
    service = service_of(model)

    async def play() -> None:
        status, answer = await call(service, SHORT)
        assert (status, len(answer["kvarn"]["request_id"])) == (200, 32)

    during(service, play)
    assert capfd.readouterr() == ("", "")
