"""httpx, aiohttp and curl: no SDK, only HTTP."""

import asyncio
import json
import subprocess

import aiohttp
import httpx
from rows import ASKED, FOX, MODEL, continued, refused, run, works

TEXT = {"model": MODEL, "prompt": FOX, "max_tokens": 5, "temperature": 0}
ERROR = {"message", "type", "param", "code"}


def whole(address: str) -> None:
    for path in ("/v1/completions", "/completions", "/v1/completions/"):
        reply = httpx.post(address + path, json=TEXT, headers={"X-Request-Id": "mine"}, timeout=60)
        assert reply.json()["choices"][0]["text"] == continued(address)
        assert reply.headers["x-request-id"] == "mine"
    assert httpx.head(f"{address}/v1/models").status_code == httpx.get(address).status_code == 200


def http_stream(address: str) -> None:
    with httpx.stream("POST", f"{address}/v1/completions", json=TEXT | {"stream": True}, timeout=60) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == continued(address)


def aio_stream(address: str) -> None:
    async def play() -> None:
        body = TEXT | {"stream": True, "max_tokens": 500, "ignore_eos": True}
        headers = {"X-Request-Id": "left early"}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{address}/v1/completions", json=body, headers=headers) as reply:
                assert (await reply.content.readline()).startswith(b"data: {")
            for _ in range(200):  # the server sees that the client has gone
                async with session.get(f"{address}/kvarn/requests/left%20early") as found:
                    if found.status == 200:
                        assert (await found.json())["cancelled"]
                        return
                await asyncio.sleep(0.02)
        raise AssertionError("the request was not cancelled")

    asyncio.run(play())


def curl(address: str) -> None:
    body = json.dumps({"model": MODEL, "messages": ASKED, "max_tokens": 8, "stream": True})
    command = ["curl", "-sSN", f"{address}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.rstrip().endswith("data: [DONE]")


def clean(reply: httpx.Response, status: int) -> None:
    """Raises if the reply is not an error in OpenAI's format."""
    found = reply.json()["error"]
    assert (reply.status_code, set(found)) == (status, ERROR), reply.text
    raise LookupError(found["message"])


def unknown(path: str):
    return refused(f"POST {path}", lambda a: clean(httpx.post(a + path, json={"model": MODEL}), 404))


ROWS = [
    works("httpx: addresses with and without /v1, HEAD, request id", whole),
    works("httpx: stream", http_stream),
    works("aiohttp: a stream that is left is cancelled", aio_stream),
    works("curl -N: stream", curl),
    *map(unknown, ("/v1/audio/speech",)),
    refused("wrong field", lambda a: clean(httpx.post(f"{a}/v1/completions", json=TEXT | {"n": 0}), 400)),
]

if __name__ == "__main__":
    run(("httpx", "aiohttp"), ROWS)
