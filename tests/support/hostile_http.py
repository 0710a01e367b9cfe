"""What attackers send: requests that are not quite HTTP, and bodies that are not quite requests."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

from kvarn.server import request_fields
from kvarn.server.protocols import PROTOCOLS

CHAT, TEXT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
USER = {"role": "user", "content": "hello"}
VALID: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 3, "temperature": 0},
    TEXT: {"prompt": "hello", "max_tokens": 3, "temperature": 0},
    TOKENIZE: {"prompt": "hello"},
    DETOKENIZE: {"tokens": [65, 66]},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3, "temperature": 0},
    "/v1/messages": {"model": "m", "messages": [USER], "max_tokens": 3, "temperature": 0},
    "/completion": {"prompt": "hello", "n_predict": 3, "temperature": 0},
    "/api/chat": {"model": "m", "messages": [USER], "options": {"num_predict": 3, "temperature": 0}, "stream": False},
    "/api/generate": {
        "model": "m",
        "prompt": "hello",
        "options": {"num_predict": 3, "temperature": 0},
        "stream": False,
    },
    "/v1/embeddings": {"input": ["hello", [65]]},
    "/apply-template": {"messages": [USER]},
}
STREAMED = (CHAT, TEXT, "/v1/responses", "/v1/messages", "/completion", "/api/chat", "/api/generate")
FIELDS = {TOKENIZE: request_fields.TOKENIZE, DETOKENIZE: request_fields.DETOKENIZE} | {
    each.path: each.fields.table for spoken in PROTOCOLS for each in spoken.addresses if each.fields is not None
}
ANSWERS = ("choices", "output", "content", "message", "response", "data", "prompt", "tokens")  # where an answer is
HOST = b"Host: localhost\r\n"
BODY = json.dumps(VALID[TEXT]).encode()


def request(path: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def post(*headers: bytes, body: bytes = BODY) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"".join(h + b"\r\n" for h in headers) + b"\r\n" + body


LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"
CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)
GET = b"GET /health HTTP/1.1\r\n"

# What is sent, and the statuses of the answers of a server without API keys. Then the client closes its side.
ODDITIES: dict[str, tuple[bytes, list[int]]] = {
    # the first line
    "nothing": (b"", []),
    "line ends only": (b"\r\n\r\n\r\n", [400]),
    "half a method": (b"GE", []),
    "no version": (b"GET /health\r\n\r\n", [400]),
    "HTTP/0.9": (b"GET /\r\n", []),
    "HTTP/1.0": (b"GET /health HTTP/1.0\r\n\r\n", [200]),
    "HTTP/2.0": (b"GET /health HTTP/2.0\r\n" + HOST + b"\r\n", [200]),
    "HTTP/1.10": (b"GET /health HTTP/1.10\r\n" + HOST + b"\r\n", [400]),
    "h2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", [404, 400]),
    "TLS hello": (bytes.fromhex("16030100a5010000a10303") + bytes(range(160)), [400]),
    "random bytes": (b"\x80" + random.Random(1).randbytes(500) + b"\r\n\r\n", [400]),
    "NUL in the path": (b"GET /\0 HTTP/1.1\r\n" + HOST + b"\r\n", [400]),
    "space in the path": (b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n", [400]),
    "bytes in the path": (b"GET /\xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n", [400]),
    "escapes in the path": (b"GET /%ff%00%2e%2e/%2e HTTP/1.1\r\n" + HOST + b"\r\n", [404]),
    "a path of 60 kB": (b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", [404]),
    "another server": (b"GET http://evil.example/health HTTP/1.1\r\n" + HOST + b"\r\n", [404]),
    "CONNECT": (b"CONNECT evil.example:443 HTTP/1.1\r\n" + HOST + b"\r\n", [404]),
    "OPTIONS *": (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", [404]),
    "an invented method": (b"FROB /health HTTP/1.1\r\n" + HOST + b"\r\n", [405]),
    "lower case": (b"get /health HTTP/1.1\r\n" + HOST + b"\r\n", [405]),
    "HEAD": (b"HEAD /health HTTP/1.1\r\n" + HOST + b"\r\n", [200]),
    # headers
    "no host": (GET + b"\r\n", [400]),
    "two hosts": (GET + HOST + HOST + b"\r\n", [400]),
    "line ends of Unix": (b"GET /health HTTP/1.1\nHost: localhost\n\n", [200]),
    "a folded header": (GET + HOST + b"X: a\r\n b\r\n\r\n", [200]),
    "folded at once": (GET + b" X: a\r\n" + HOST + b"\r\n", [400]),
    "space before the colon": (GET + b"Host : localhost\r\n\r\n", [400]),
    "no colon": (GET + HOST + b"nonsense\r\n\r\n", [400]),
    "NUL in a header": (GET + HOST + b"X: a\0b\r\n\r\n", [400]),
    "bytes in a header": (GET + HOST + b"X: \xff\xfe\r\n\r\n", [200]),
    "an endless header": (GET + HOST + b"X: " + b"a" * 100_000, [400]),
    "10,000 headers": (GET + HOST + b"X: a\r\n" * 10_000 + b"\r\n", [200]),
    "an upgrade": (GET + HOST + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n", [200]),
    "an upgrade to h2c": (GET + HOST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n", [200]),
    "Expect": (post(LENGTH, b"Expect: 100-continue"), [200]),
    "another Expect": (post(LENGTH, b"Expect: 200-maybe"), [200]),
    # lengths
    "two lengths": (post(LENGTH, b"Content-Length: 3"), [400]),
    "one length twice": (post(LENGTH, LENGTH), [200]),
    "a list of lengths": (post(b"Content-Length: 3, 4"), [400]),
    "a negative length": (post(b"Content-Length: -5"), [400]),
    "a length with a sign": (post(b"Content-Length: +5"), [400]),
    "a length in hex": (post(b"Content-Length: 0x10"), [400]),
    "a length that is no number": (post(b"Content-Length: many"), [400]),
    "a length of 400 digits": (post(b"Content-Length: " + b"9" * 400), [400]),
    "a huge length": (post(b"Content-Length: 99999999999"), [413]),
    "no length": (post(), [400]),  # the body is empty
    "a short body": (post(b"Content-Length: 1000"), []),
    "a long body": (post(LENGTH, body=BODY + b"xyz\r\n\r\n"), [200, 400]),
    # chunks
    "chunks": (post(CHUNKED, body=CHUNK + b"0\r\n\r\n"), [200]),
    "chunks and a length": (post(CHUNKED, LENGTH, body=CHUNK + b"0\r\n\r\n" + GET + HOST + b"\r\n"), [400]),
    "chunks, twice": (post(CHUNKED, CHUNKED, body=CHUNK + b"0\r\n\r\n"), [400]),
    "gzip chunks": (post(b"Transfer-Encoding: gzip, chunked", body=CHUNK + b"0\r\n\r\n"), [400]),
    "identity": (post(b"Transfer-Encoding: identity"), [400]),
    "a chunk size that is no number": (post(CHUNKED, body=b"zz\r\n\r\n"), [400]),
    "a negative chunk": (post(CHUNKED, body=b"-5\r\nabcde\r\n0\r\n\r\n"), [400]),
    "an endless chunk size": (post(CHUNKED, body=b"1" * 40 + b"\r\n"), [400]),
    "a huge chunk": (post(CHUNKED, body=b"fffffffffffffff\r\nabc"), []),
    "a chunk without its end": (post(CHUNKED, body=b"3\r\nabcX0\r\n\r\n"), [400]),
    "a chunk extension": (post(CHUNKED, body=CHUNK.replace(b"\r\n", b";a=b\r\n", 1) + b"0\r\n\r\n"), [200]),
    "a long chunk extension": (post(CHUNKED, body=b"3;" + b"a" * 100_000), [400]),
    "trailers": (post(CHUNKED, body=CHUNK + b"0\r\nX: y\r\n\r\n"), [200]),
    "no last chunk": (post(CHUNKED, body=CHUNK), []),
    # several requests
    "two at once": (2 * post(LENGTH), [200, 200]),
    "a hundred at once": (100 * (GET + HOST + b"\r\n"), [200] * 100),
    "close and another": (GET + HOST + b"Connection: close\r\n\r\n" + GET + HOST + b"\r\n", [200]),
    "one and a half": (post(LENGTH) + b"GET /heal", [200]),
    "one and rubbish": (post(LENGTH) + b"\0\0\0\0\r\n\r\n", [200, 400]),
    "smuggled": (post(LENGTH, body=BODY + GET + HOST + b"\r\n"), [200, 200]),
}

NASTY = ["", "x", -1, 0, 1, 2.5, 1e400, 10**40, -(2**63), True, None, [], {}, [[]], [None], [""], {"": ""}, [{}]]
NASTY += ["\0", "\ud800", "\N{GRINNING FACE}" * 3, "a" * 5000, [0] * 5000, {"a": {"a": {"a": []}}}, "NaN", [-1], [1e9]]


def hostile_bodies(path: str) -> Iterator[bytes]:
    """Bodies that this endpoint must answer in order or refuse, never with an internal error."""
    good = json.dumps(VALID[path]).encode()
    yield from (
        b"",
        b"{",
        b"}",
        b"null",
        b"1",
        b'"a"',
        b"[]",
        b"[1]",
        b"{}",
        b"{}{}",
        b" ",
        b"\0",
        b"\xff\xfe",
        b"true",
    )
    yield from (good[:-1], good[1:], good + b"x", good + good, b"\xef\xbb\xbf" + good, good.decode().encode("utf-16"))
    yield from (b"[" * 100_000, b'{"a":' * 50_000, b"[" * 300_000, b'{"user":' + b"[" * 900 + b"]" * 900 + b"}")
    yield from (
        b'{"user": ' + number + b"}" for number in (b"NaN", b"-Infinity", b"9" * 5000, b"1e99999", b"01", b".5")
    )
    yield from (b'{"a": 1, "a": 2}', b'{"\\ud800": 1}', b'{"user": "\\ud800"}', b'{"user": "\x01"}', b"'a'", b"{a: 1}")
    yield good.replace(b"{", b'{"user": "' + b"a" * 100_000 + b'", ', 1)
    yield good.replace(b"{", b'{"metadata": [' + b"{}," * 1000 + b"{}], ", 1)
    yield good.replace(b"{", b'{"' + b"k" * 100_000 + b'": 1, ', 1)
    for field in FIELDS[path]:
        for value in NASTY:
            yield json.dumps(VALID[path] | {field: value}).encode()
    for key in ("role", "content", "name", "tool_calls", "weight"):
        for value in NASTY:
            yield json.dumps(VALID[path] | {"messages": [{"role": "user", "content": "a"} | {key: value}]}).encode()


def said(answer: dict[str, Any]) -> object:
    """The part of an answer that is the same each time."""
    found = next(answer[name] for name in ANSWERS if name in answer)
    return (
        [{**each, "id": ""} if isinstance(each, dict) else each for each in found] if isinstance(found, list) else found
    )


def message_of(answer: dict[str, Any]) -> str:
    """Of a refusal. Ollama's has no object."""
    error = answer["error"]
    message: str = error if isinstance(error, str) else error["message"]
    return message


def statuses(received: bytes) -> list[int]:
    """Of the answers in it, without interim ones."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", received) if status != b"100"]


def mutated(rng: random.Random, sent: bytes) -> bytes:
    """The bytes with a few random changes."""
    data = bytearray(sent)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(data) + 1)
        end = min(at + rng.choice([1, 1, 2, 10, 100]), len(data))
        change = rng.randrange(6)
        if change == 0:
            data[at:end] = rng.randbytes(end - at)
        elif change == 1:
            del data[at:end]
        elif change == 2:
            data[at:at] = data[at:end] * rng.choice([1, 2, 50])
        elif change == 3:
            data[at:at] = rng.choice(
                [b"\r\n", b"\0", b" ", b":", b"\n", b'"', b"{", b"[", b",", b"\xff", b"-", b"9" * 30]
            )
        elif change == 4:
            del data[at:]
        elif at < len(data):
            data[at] ^= 1 << rng.randrange(8)
    return bytes(data)
