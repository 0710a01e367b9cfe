"""The page: what `/` answers, the stream of changes, who sees which text, and that nobody watching costs nothing."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.serving import Reply, Served, serve, tiny_model

from kvarn import LLM
from kvarn.cache.journal import BlockNow, GroupChanges
from kvarn.cache.prefix import root_hash
from kvarn.server.access import Access, Caller
from kvarn.server.metrics import Metrics
from kvarn.server.page.lanes import Lane
from kvarn.server.page.live import MOST_WATCHERS, Live
from kvarn.server.page.observer import Counts, Observation
from kvarn.server.page.state import MOST_LANES, MOST_TICKS, State
from kvarn.server.page.static import wants_page
from kvarn.server.refusal import Refusal
from kvarn.server.worker import Worker

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 512)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with serve(model, "-np", "4") as served:
        yield served


@pytest.fixture(scope="module")
def keyed(model: Path) -> Iterator[Served]:
    with serve(model, "-np", "4", "--api-key", "alice", "--api-key", "bob") as served:
        yield served


def key_of(server: Served) -> str:
    (line,) = [line for line in server.summary if line.startswith("page")]
    return line.partition("#key=")[2]


def ask(server: Served, path: str, method: str = "GET", **headers: str) -> Reply:
    connection = server.connection()
    connection.request(method, path, None, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    reply = Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    connection.close()
    return reply


class Watching:
    """A client that applies the frames, as the page does."""

    def __init__(self, server: Served, key: str | None = None) -> None:
        self.connection = server.connection()
        self.connection.request("GET", "/kvarn/live", headers={"Authorization": f"Bearer {key}"} if key else {})
        self.response = self.connection.getresponse()
        self.lines: list[bytes] = []
        self.groups: list[dict[int, list[float]]] = []
        self.lanes: dict[int, dict] = {}

    def read(self) -> dict[str, Any]:
        line = self.response.readline()
        while line == b"\n":
            line = self.response.readline()
        self.lines.append(line)
        frame = json.loads(line)
        if "facts" in frame:
            self.facts, self.lanes = frame["facts"], {}
            self.groups = [{} for _ in frame["groups"]]
        for known, group in zip(self.groups, frame["groups"], strict=True):
            for row in group["blocks"]:
                known[row[0]] = row
                if len(row) == 1:
                    del known[row[0]]
        self.lanes |= {lane["number"]: lane for lane in frame["lanes"]}
        for number in frame.get("gone", ()):
            del self.lanes[number]
        self.counts, self.next = frame["counts"], [group["next"] for group in frame["groups"]]
        return frame

    def until_ended(self, n: int) -> None:
        while sum(lane["finish"] is not None for lane in self.lanes.values()) < n or self.counts["running"]:
            self.read()

    def close(self) -> None:
        self.response.close()
        self.connection.close()

    def __enter__(self) -> "Watching":
        if self.response.status == 200:
            self.read()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def complete(server: Served, prompt: str, key: str | None = None, n: int = 8) -> None:
    reply = server.ask(TEXT, {"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True}, key)
    assert reply.status == 200, reply.body


# -- the files ---------------------------------------------------------------------------------------------------


def test_browsers_get_the_page_and_programs_the_list_of_endpoints(server: Served) -> None:
    page = ask(server, "/", Accept=BROWSER)
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for headers in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}, {"Accept": "text/html;q=0"}):
        found = ask(server, "/", **headers)
        assert found.json["name"] == "kvarn"
        assert "GET /kvarn/live" in found.json["endpoints"]
        assert found.headers["vary"] == page.headers["vary"] == "Accept"
    for accept, kind in ((BROWSER, "text/html; charset=utf-8"), ("*/*", "application/json")):
        head = ask(server, "/", "HEAD", Accept=accept)
        assert (head.status, head.body, head.headers["content-type"]) == (200, b"", kind)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [(BROWSER, True), ("TEXT/HTML", True), ("", False), ("*/*", False), ("text/html; q=0", False), (";,;", False)],
)
def test_which_accept_asks_for_the_page(accept: str, wanted: bool) -> None:
    assert wants_page(accept) == wanted


def test_the_page_loads_only_its_own_files_and_has_nothing_inline(server: Served) -> None:
    page = ask(server, "/", Accept=BROWSER)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    html = page.body.decode()
    assert "http://" not in html
    assert "https://" not in html
    assert "style=" not in html
    assert html.count("<script") == html.count('<script type="module" src="/kvarn/page/') == 1
    seen, waiting = set(), ["main.js", "page.css", "icon.svg"]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        reply = ask(server, f"/kvarn/page/{name}")
        assert reply.status == 200, name
        assert reply.headers["x-content-type-options"] == "nosniff"
        text = reply.body.decode()
        assert not any(
            word in text for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "document.write")
        )
        waiting += [part.split('"')[0] for part in text.split('from "./')[1:]]
    assert len(seen) >= 12


def test_files_are_not_sent_twice_and_no_other_file_is_served(server: Served) -> None:
    first = ask(server, "/kvarn/page/main.js")
    assert ask(server, "/kvarn/page/main.js", If_None_Match=first.headers["etag"]).status == 304
    for name in ("static.py", "..%2fstatic.py", "../access.py", "", "index.html%00", "%2e%2e/%2e%2e/app.py"):
        assert ask(server, f"/kvarn/page/{name}").status == 404, name


def test_no_page(model: Path) -> None:
    with serve(model, "--no-page") as server:
        assert not [line for line in server.summary if line.startswith("page")]
        assert ask(server, "/", Accept=BROWSER).json["name"] == "kvarn"
        for path in ("/kvarn/page/main.js", "/kvarn/live", "/kvarn/cache/texts?blocks=0"):
            assert ask(server, path).status == 404
        assert "GET /kvarn/live" not in ask(server, "/").json["endpoints"]


# -- the stream --------------------------------------------------------------------------------------------------


def test_deltas_add_up_to_what_a_fresh_watcher_sees(server: Served) -> None:
    key = key_of(server)
    with Watching(server, key) as watching:
        before = len(watching.lanes)
        for i in range(6):
            complete(server, f"something {i % 3} that is long enough for some blocks " * (i + 1), key, 20)
        watching.until_ended(before + 6)
        with Watching(server, key) as fresh:
            assert len(watching.lines) > 1
            assert fresh.groups == watching.groups
            assert fresh.counts == watching.counts
            assert fresh.next == watching.next
            assert {n: lane for n, lane in fresh.lanes.items() if n >= 0} == {
                n: lane for n, lane in watching.lanes.items() if n >= 0
            }
        usage = server.cache(key)
        assert sum(row[2] for row in watching.groups[0].values()) == usage["resident_tokens"]
        assert len(watching.groups[0]) == usage["blocks"]["used"] + usage["blocks"]["cached"]


def test_a_lane_tells_what_was_reused_computed_and_decoded(server: Served) -> None:
    key = key_of(server)
    with Watching(server, key) as watching:
        before = len(watching.lanes)
        for _ in range(2):
            complete(server, "a prompt for a lane, and again " * 4, key, 12)
        watching.until_ended(before + 2)
        first, second = sorted(watching.lanes.values(), key=lambda lane: lane["number"])[-2:]
        assert (first["decoded"], second["decoded"], second["computed"]) == (12, 12, 1)
        assert second["reused"] == second["prompt"] - 1
        assert second["queued"] <= second["started"] <= second["first"] <= second["finished"]
        assert second["whose"] == "own"
        assert server.ask(f"/kvarn/requests/{second['request']}", key=key).json["reused_tokens"] == second["reused"]
        nodes = {row[5] for row in watching.groups[0].values()}
        assert second["leaves"][0] in nodes


def test_earlier_requests_are_shown_to_who_comes_later(server: Served) -> None:
    key = key_of(server)
    for n in range(1, 9):  # most of them in the same second
        complete(server, "before anybody watched", key, n)
    server.until_idle()
    with Watching(server, key) as watching:
        lanes = sorted(watching.lanes.values(), key=lambda lane: (lane["queued"], lane["number"]))
        assert [lane["decoded"] for lane in lanes if lane["whose"] == "own"][-8:] == list(range(1, 9))


# -- who sees what -----------------------------------------------------------------------------------------------


def test_a_key_sees_the_numbers_of_all_and_the_text_of_its_own(keyed: Served) -> None:
    secret = "the violet elephant sings at night and nobody hears it"
    complete(keyed, secret, "bob", 40)
    complete(keyed, "what alice wrote herself, which she may read again", "alice", 40)
    keyed.until_idle()
    with Watching(keyed, "alice") as watching:
        assert watching.facts["texts"]
        own = {block for block, row in watching.groups[0].items() if row[-1]}
        assert own
        assert own < watching.groups[0].keys()
        everything = ",".join(str(block) for block in watching.groups[0])
        texts = keyed.ask(f"/kvarn/cache/texts?blocks={everything}", key="alice").json["texts"]
        assert {int(block) for block in texts} == own
        assert "alice wrote" in "".join(texts[block] for block in sorted(texts, key=int))
        assert "elephant" not in json.dumps(texts)
        complete(keyed, secret, "bob", 4)
        watching.until_ended(2)
        others = [lane for lane in watching.lanes.values() if lane["whose"] == "other"]
        assert others
        assert {lane["request"] for lane in others} == {None}
        assert not any(b"elephant" in line or b"owner" in line for line in watching.lines)


def test_shared_prefixes_show_no_text() -> None:
    """Keys that share prefixes share blocks, and a block does not say who wrote it."""
    sharing = Access(["alice", "bob"], share=True).caller("Bearer alice")
    state, block = State({}, 1), BlockNow(1, 16, 0, 1, 1, -1, 0.0, root_hash(b""))
    state.apply(seen([], 1)._replace(groups=[GroupChanges({3: block}, {}, [])]))
    for caller, own in ((sharing, 0), (sharing._replace(quotes=True), 1)):
        frame = json.loads(state.frame(None, caller))
        assert frame["facts"]["texts"] == bool(own)
        assert frame["groups"][0]["blocks"] == [[3, 1, 16, 0, 1, 1, -1, 0.0, own]]


def test_without_keys_only_the_pages_own_key_gets_texts(server: Served) -> None:
    key = key_of(server)
    complete(server, "a text without any key, long enough to fill a block", None, 30)
    complete(server, "a text of the page itself, long enough to fill a block", key, 30)
    server.until_idle()
    with Watching(server, key) as watching:
        assert watching.facts["texts"]
        assert {lane["whose"] for lane in watching.lanes.values()} == {"own", "open"}
        everything = ",".join(map(str, watching.groups[0]))
    for other in (None, "sk-anything"):
        assert server.ask(f"/kvarn/cache/texts?blocks={everything}", key=other).json == {"texts": {}}
        with Watching(server, other) as watching:
            assert not watching.facts["texts"]
    found = json.dumps(server.ask(f"/kvarn/cache/texts?blocks={everything}", key=key).json)
    assert "of the page itself" in found
    assert "without any key" not in found
    assert server.ask("/v1/models", key="sk-anything").status == server.ask("/v1/models").status == 200


def test_the_pages_key_shares_nothing_with_others() -> None:
    access = Access([], page_key="made")
    page, nobody = access.caller("Bearer made"), access.caller("Bearer other")
    assert nobody == access.caller(None) == Caller(b"", b"", quotes=False, keeps_text=False)
    assert page.quotes
    assert page.salt != nobody.salt
    assert page == access.caller(None, "made")


@pytest.mark.parametrize(
    "query", ["", "blocks=", "blocks=x", "blocks=-1", "blocks=99999999", "group=7&blocks=0", "blocks=²"]
)
def test_bad_questions_for_texts_are_refused(server: Served, query: str) -> None:
    path = f"/kvarn/cache/texts?{query}".encode().decode("latin-1")
    assert server.ask(path.encode("ascii", "replace").decode()).status == 400


def test_a_server_with_keys_asks_for_one(keyed: Served) -> None:
    for path in ("/kvarn/live", "/kvarn/cache/texts?blocks=0"):
        assert keyed.ask(path).status == keyed.ask(path, key="mallory").status == 401
    assert ask(keyed, "/", Accept=BROWSER).status == 200
    assert "asks for an API key" in "".join(keyed.summary)


# -- watchers ----------------------------------------------------------------------------------------------------


def test_the_place_of_a_watcher_who_left_is_free_again(server: Served) -> None:
    with contextlib.ExitStack() as stack:

        def enters() -> bool:
            """Those of earlier tests may be about to leave."""
            watcher = stack.enter_context(Watching(server))
            watchers.append(watcher)
            if watcher.response.status != 200:
                complete(server, "changes are sent, and show who has gone", None, 1)
            return watcher.response.status == 200

        watchers: list[Watching] = []
        for _ in range(MOST_WATCHERS):
            server.until(enters)
        refused = server.ask("/kvarn/live")
        assert refused.status == 429
        assert refused.headers["retry-after"]
        assert server.ask("/kvarn/live", method="HEAD").status == 200
        complete(server, "an answer while twenty watch", None, 30)
        watchers[-1].close()
        server.until(enters)


def test_streams_end_when_the_server_stops(model: Path) -> None:
    with serve(model, "--drain-seconds", "30") as server, Watching(server) as watching:
        assert server.stop() == 0
        assert watching.response.read() == b""


def inside(model: Path) -> tuple[LLM, Worker]:
    llm = LLM(model, cache="paged", max_seqs=2)
    return llm, Worker(llm, Metrics(llm.engine, "tiny"))


def test_nobody_watching_means_no_look_and_no_note(model: Path) -> None:
    llm, worker = inside(model)
    pool = llm.cache.placements[0].pool
    idle, nobody = pool.touched, worker.audience

    async def play() -> None:
        worker.start(asyncio.get_running_loop())
        ticks: asyncio.Queue[None] = asyncio.Queue()

        async def pause(seconds: float) -> None:
            await ticks.get()

        live = Live(worker, State({}, 1), pause)
        assert (live.n_looks, pool.touched, worker.audience) == (0, idle, nobody)
        watcher = live.enter()
        lines = live.lines(watcher, Caller(b"", b"", quotes=False), lambda: ())
        assert "facts" in json.loads(await anext(lines))
        assert live.n_looks == 1
        assert pool.touched != idle
        for n in (2, 3):
            ticks.put_nowait(None)
            while live.n_looks < n:
                await asyncio.sleep(0)
        live.leave(watcher)
        ticks.put_nowait(None)
        while pool.touched is not idle:
            await asyncio.sleep(0.001)
        assert live.n_looks == 3
        assert worker.audience is not live
        await asyncio.to_thread(worker.stop)

    asyncio.run(asyncio.wait_for(play(), 60))
    llm.close()


# -- frames ------------------------------------------------------------------------------------------------------

NOBODY = Caller(b"", b"", quotes=False)


def lane(number: int, finish: str | None = None) -> Lane:
    return Lane(number, b"", f"r{number}", 3, 0, 3, number, 0, float(number), None, None, None, (), (), finish)


def seen(lanes: list[Lane], decoded: int) -> Observation:
    return Observation(1.0, [], lanes, Counts(0, 0, decoded, 0, 0, 0, {}, 0, 0))


def test_a_watcher_who_is_far_behind_gets_everything() -> None:
    state = State({}, 0)
    for tick in range(MOST_TICKS + 5):
        assert state.apply(seen([lane(1)], tick))
    assert "facts" not in json.loads(state.frame(state.tick - 1, NOBODY))
    assert "facts" in json.loads(state.frame(1, NOBODY))
    assert not state.apply(seen([lane(1)], MOST_TICKS + 4)), "nothing changed"


def test_frames_for_the_same_key_are_made_once() -> None:
    state = State({}, 0)
    for tick in range(3):
        state.apply(seen([lane(tick)], tick))
    assert state.frame(2, NOBODY) is state.frame(2, NOBODY)
    assert state.frame(2, NOBODY) is not state.frame(2, Caller(b"x", b"x", quotes=True))


def test_ended_lanes_are_bounded_and_open_ones_stay() -> None:
    state = State({}, 0)
    state.apply(seen([lane(0)], 0))
    for number in range(1, MOST_LANES + 11):
        state.apply(seen([lane(number, "stop")], number))
    shown = [each["number"] for each in json.loads(state.frame(None, NOBODY))["lanes"]]
    assert shown == [0, *range(11, MOST_LANES + 11)]
    assert json.loads(state.frame(state.tick - 1, NOBODY))["gone"] == [10]


def test_a_closed_view_takes_no_watchers(model: Path) -> None:
    llm, worker = inside(model)
    live = Live(worker, State({}, 1))
    live.close()
    with pytest.raises(Refusal, match="stopping"):
        live.enter()
    llm.close()


def test_the_address_of_the_page_has_its_key_in_the_fragment(server: Served) -> None:
    assert len(key_of(server)) >= 20
    (line,) = [line for line in server.summary if line.startswith("page")]
    assert line.split()[1] == f"{server.url}/#key={key_of(server)}"
