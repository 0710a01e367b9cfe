"""Host and Origin: which names the server answers to, which web pages may use it, and what they may read."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.serving import Reply, Served, serve, tiny_model

from kvarn.cli import main
from kvarn.errors import KvarnError
from kvarn.server.origin import Sites
from kvarn.server.refusal import Refusal

TEXT = "/v1/completions"
SHORT = {"prompt": "something short", "max_tokens": 2, "temperature": 0}
EVIL = "http://evil.example"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 256)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with serve(model, "--allowed-host", "kvarn.lan", "--cors-origin", "https://chat.example") as served:
        yield served


def ask(server: Served, method: str, path: str, body: object = None, **headers: str) -> Reply:
    connection = server.connection()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, None if body is None else json.dumps(body).encode(), named)
    response = connection.getresponse()
    reply = Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    connection.close()
    return reply


def answers(sites: Sites, host: str | None) -> bool:
    try:
        sites.check_host(host)
    except Refusal as refusal:
        return (refusal.status, "--allowed-host" in str(refusal)) != (403, True)
    return True


LOCAL_HOSTS = ["localhost", "LOCALHOST:8000", "localhost.", "a.localhost:1", "127.0.0.1", "127.8.9.1:80", "[::1]:8000"]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evillocalhost"]
FOREIGN += [
    "",
    "a@localhost",
    "localhost/x",
    "localhost:80:80",
    "[::1",
    "127.1",
    "8.8.8.8",
    "[2001:db8::1]",
    "x y",
    ".",
]


@pytest.mark.parametrize("host", [*LOCAL_HOSTS, "host.docker.internal:8000", None])
def test_names_of_this_machine_are_always_answered(host: str | None) -> None:
    for sites in (Sites(("127.0.0.1",)), Sites(("0.0.0.0",)), Sites(("10.1.2.3",), ["x"])):
        assert answers(sites, host)


@pytest.mark.parametrize("host", FOREIGN)
def test_other_names_are_refused(host: str) -> None:
    assert not answers(Sites(("127.0.0.1",), ["example.evil", "xevil.example"]), host)


def test_the_name_given_with_host_is_answered() -> None:
    sites = Sites(("kvarn.lan", "192.168.1.5"))
    assert [answers(sites, host) for host in ("Kvarn.LAN:8000", "192.168.1.5", "192.168.1.6")] == [True, True, False]
    assert answers(Sites(("2001:DB8::0:1",)), "[2001:db8::1]:8000")


def test_a_server_on_all_addresses_answers_to_every_address() -> None:
    for bound in ("0.0.0.0", "::"):
        assert answers(Sites((bound,)), "192.168.1.6:8000")
        assert answers(Sites((bound,)), "[2001:db8::1]")
        assert not answers(Sites((bound,)), "evil.example")


def test_allowed_hosts() -> None:
    for name in (".kvarn.lan", "*.Kvarn.LAN"):
        sites = Sites((), [name])
        assert all(answers(sites, host) for host in ("kvarn.lan", "a.kvarn.lan:80", "a.b.kvarn.lan"))
        assert not answers(sites, "evilkvarn.lan")
    assert answers(Sites((), ["*"]), "evil.example")
    for name in ("", ".", "a b", "http://x", "x:80", "a/b", "*x", "a.*"):
        with pytest.raises(KvarnError, match="--allowed-host is"):
            Sites((), [name])


def test_with_keys_names_are_checked_only_if_some_are_given() -> None:
    assert answers(Sites(("127.0.0.1",), keys=True), "evil.example")
    assert not answers(Sites(("127.0.0.1",), ["kvarn.lan"], keys=True), "evil.example")


def reads(sites: Sites, origin: str, host: str = "localhost:8000") -> bool | None:
    """None: the page may not even send."""
    try:
        return sites.check_origin(origin, host)
    except Refusal as refusal:
        return None if (refusal.status, "--cors-origin" in str(refusal)) == (403, True) else True


def test_pages_of_this_machine_and_of_the_server_itself_may_read() -> None:
    sites = Sites(("127.0.0.1",))
    for origin in ("http://localhost:3000", "https://127.0.0.1", "http://[::1]:1", "tauri://localhost"):
        assert reads(sites, origin) is True
    assert reads(sites, "https://kvarn.lan", "kvarn.lan") is True
    assert reads(sites, "https://kvarn.lan", "kvarn.lan:443") is True
    assert reads(sites, "http://kvarn.lan:8000", "kvarn.lan:8000") is True
    assert reads(sites, "http://kvarn.lan:3000", "kvarn.lan:8000") is None, "another application"


@pytest.mark.parametrize("origin", [EVIL, "null", "http://localhost.evil.example", "http://a@localhost", "localhost"])
def test_other_pages_may_not_send(origin: str) -> None:
    assert reads(Sites(("127.0.0.1",)), origin) is None
    assert reads(Sites(("127.0.0.1",), origins=["https://evil.example", "http://evil.example:1"]), origin) is None
    assert reads(Sites(("127.0.0.1",), origins=["*"]), origin) is True
    assert reads(Sites(("127.0.0.1",), keys=True), origin) is False, "it has no key; behind a proxy it may be our own"
    assert reads(Sites(("127.0.0.1",), origins=["https://x"], keys=True), origin) is None


def test_allowed_origins() -> None:
    assert reads(Sites(origins=["HTTPS://Chat.Example/"]), "https://chat.example") is True
    assert reads(Sites(origins=["null"]), "null") is True
    assert reads(Sites(origins=["app://obsidian.md"]), "app://obsidian.md") is True
    for origin in ("chat.example", "https://", "https://a/b", ""):
        with pytest.raises(KvarnError, match="--cors-origin is"):
            Sites(origins=[origin])


def test_a_foreign_name_is_refused_by_every_endpoint(server: Served) -> None:
    paths = ("/health", "/ready", "/metrics", "/openapi.json", "/v1/models", "/kvarn/requests", "/kvarn/cache", "/none")
    for method, path in [("GET", path) for path in paths] + [("POST", TEXT), ("OPTIONS", TEXT), ("PUT", "/")]:
        reply = ask(server, method, path, SHORT if method == "POST" else None, Host="evil.example")
        assert (reply.status, reply.json["error"]["code"]) == (403, "host_not_allowed")
    assert reply.error == (
        "the Host of this request, evil.example, is not a known name of this server; whoever runs the server "
        "can allow it with --allowed-host evil.example"
    )
    assert ask(server, "GET", "/v1/models", Host="kvarn.lan").status == 200
    with server.raw(b"GET /health HTTP/1.0\r\n\r\n") as old:
        assert old.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_foreign_page_cannot_post_even_plain_text(server: Served) -> None:
    before = server.metric("kvarn:prompt_tokens_total")
    for origin in (EVIL, "null"):
        reply = ask(server, "POST", TEXT, SHORT, Origin=origin, Content_Type="text/plain")
        assert (reply.status, reply.json["error"]["code"]) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in reply.headers
        asked = ask(server, "OPTIONS", TEXT, Origin=origin, Access_Control_Request_Method="POST")
        assert asked.status == 403
        assert "access-control-allow-origin" not in asked.headers
    assert server.metric("kvarn:prompt_tokens_total") == before


@pytest.mark.parametrize("origin", ["https://chat.example", "http://localhost:3000"])
def test_an_allowed_page_reads_answers_streams_and_errors(server: Served, origin: str) -> None:
    stream = SHORT | {"stream": True}
    for body, status in ((SHORT, 200), (stream, 200), ({}, 400), (SHORT | {"n": 0}, 400)):
        reply = ask(server, "POST", TEXT, body, Origin=origin)
        assert reply.status == status
        assert reply.headers["access-control-allow-origin"] == origin
        assert "origin" in reply.headers["vary"].lower()
        assert "retry-after" in reply.headers["access-control-expose-headers"].lower()
    for method, path, status in (("GET", "/none", 404), ("PUT", TEXT, 405), ("OPTIONS", TEXT, 405)):
        reply = ask(server, method, path, Origin=origin)
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, origin)


def test_a_preflight_is_answered(server: Served) -> None:
    asked = {"Origin": "https://chat.example", "Access_Control_Request_Method": "POST"}
    wanted = "authorization,content-type,x-stainless-os"
    reply = ask(server, "OPTIONS", TEXT, **asked, Access_Control_Request_Headers=wanted)
    assert (reply.status, reply.body) == (200, b"")
    assert reply.headers["access-control-allow-origin"] == "https://chat.example"
    assert reply.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    assert reply.headers["access-control-allow-headers"] == wanted
    assert int(reply.headers["access-control-max-age"]) > 0
    assert "access-control-allow-private-network" not in reply.headers
    reply = ask(server, "OPTIONS", TEXT, **asked, Access_Control_Request_Private_Network="true")
    assert reply.headers["access-control-allow-private-network"] == "true"
    assert reply.headers["access-control-allow-headers"] == "Authorization, Content-Type, X-Api-Key, X-Request-Id"
    reply = ask(server, "OPTIONS", TEXT, **asked, Access_Control_Request_Headers="a: b")
    assert reply.headers["access-control-allow-headers"] == "Authorization, Content-Type, X-Api-Key, X-Request-Id"


def test_requests_without_origin_have_no_cors_headers(server: Served) -> None:
    assert not [name for name in ask(server, "GET", "/health").headers if name.startswith("access-control")]


def test_with_keys_the_key_decides(model: Path) -> None:
    with serve(model, "--api-key", "k") as server:
        key = {"Authorization": "Bearer k"}
        reply = ask(server, "POST", TEXT, SHORT, Host="any.proxy", Origin=EVIL, **key)
        assert (reply.status, "access-control-allow-origin" in reply.headers) == (200, False)
        assert ask(server, "POST", TEXT, SHORT, Host="any.proxy", Origin=EVIL).status == 401
        local = ask(server, "POST", TEXT, SHORT, Origin="http://localhost:3000", **key)
        assert (local.status, local.headers["access-control-allow-origin"]) == (200, "http://localhost:3000")
        asked = {"Origin": "http://localhost:3000", "Access_Control_Request_Method": "POST"}
        assert ask(server, "OPTIONS", TEXT, **asked).status == 200, "a preflight has no key"
        refused = ask(server, "POST", TEXT, SHORT, Origin="http://localhost:3000")
        assert (refused.status, "access-control-allow-origin" in refused.headers) == (401, True)


SECRET = {"prompt": "the password is hunter2 ok", "max_tokens": 1, "temperature": 0}
GUESS = SECRET | {"prompt": "the password is zzz"}
OWNERS = {"nobody": (), "one key": ("--api-key", "k"), "asked for": ("--quote-texts",)}


@pytest.mark.parametrize("who", OWNERS)
def test_without_keys_no_text_is_quoted_to_another_client(model: Path, who: str) -> None:
    key = "k" if who == "one key" else None
    with serve(model, *OWNERS[who]) as server:
        server.ask(TEXT, SECRET, key)
        answer = server.ask(TEXT, GUESS, key).json
        ended = answer["kvarn"]["reuse_ended"]
        assert (ended["reason"], ended["at"]) == ("differs", 16)
        assert ended["ours"]["onward"] == "zzz", "its own text"
        stored = server.ask(f"/kvarn/requests/{answer['id']}", key=key).json
        everything = json.dumps([server.ask("/kvarn/requests", key=key).json, stored, answer["kvarn"]])
        if who == "nobody":
            assert "hunter" not in everything
            assert "theirs" not in ended
            assert "104" not in json.dumps(ended), "the token of h"
            assert stored["reuse_ended"] == {"reason": "differs", "at": 16, "character": 16}
            assert "zzz" not in json.dumps(stored), "everybody can read the records"
            assert "password" not in json.dumps(server.ask("/kvarn/requests").json)
        else:
            assert ended["theirs"]["onward"].startswith("hunter")
            assert "hunter" in stored["summary"]
            assert stored == answer["kvarn"]


def test_flags_that_make_no_sense_are_refused(model: Path, capsys: pytest.CaptureFixture) -> None:
    for flags, message in (
        (("--quote-texts", "--api-key", "k"), "--quote-texts is for a server without API keys"),
        (("--allowed-host", "a:1"), "--allowed-host is a:1; give a name without a port"),
        (("--cors-origin", "chat.example"), "--cors-origin is chat.example; give https://name"),
    ):
        assert main(["serve", "-m", str(model), "--port", "0", *flags]) == 1
        assert message in capsys.readouterr().err
