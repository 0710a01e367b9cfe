"""What must hold in the browser. The docstring of a check is its row in docs/page.md."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, Page, expect
from server import ROOT, Server

Start = Callable[..., Server]
AXE = (ROOT / "build" / "page" / "node_modules" / "axe-core" / "axe.min.js").read_text()
SIZES = {"phone": (390, 844), "laptop": (1366, 900), "wide": (1920, 1080)}
HOSTILE = (
    "<img src=x onerror=alert(1)><script>document.title='owned'</script>"
    "</pre><svg onload=alert(2)> \u202egnp.exe\u202c \x1b[31mred\x07 \u200bend"
)
SECONDS = 90_000  # of an answer


class Watched:
    """A page whose errors, console and policy violations are collected."""

    def __init__(self, browser: Browser, size: str = "laptop", scheme: str = "light") -> None:
        width, height = SIZES[size]
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("dialog", lambda dialog: (self.errors.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, address: str, state: str = "live") -> Page:
        self.page.goto(address)
        self.page.wait_for_selector(f"#status[data-state={state}]")
        return self.page

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self.context.close()
        if kind is None:
            assert not self.errors, self.errors


def ask(page: Page, text: str) -> None:
    n = page.locator(".reuse").count()
    page.fill("#prompt", text)
    page.click("#send")
    page.locator(".reuse").nth(n).wait_for(timeout=SECONDS)


def again(page: Page) -> None:
    n = page.locator(".reuse").count()
    page.click("#again")
    page.locator(".reuse").nth(n).wait_for(timeout=SECONDS)


def findings(page: Page) -> list[str]:
    page.evaluate(AXE)  # the protocol's own evaluation: the page's policy allows no script of others
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [f"{each['id']}: {node['target']}" for each in found["violations"] for node in each["nodes"]]


def none_found(page: Page) -> None:
    found = findings(page)
    assert not found, found


def press_again_and_nothing_is_computed(browser: Browser, start: Start, shots: Path) -> None:
    """A prompt fills blocks while the answer is written. Pressed again, one token is computed, as the page says."""
    with start("-c", "1024") as server, Watched(browser) as watched:
        page = watched.open(server.page)
        expect(page.locator("#no-lanes")).to_be_visible()
        page.fill("#limit", "60")
        ask(page, "Name three rivers and say where they flow.")
        again(page)
        expect(page.locator(".reuse").nth(1)).to_contain_text("computed 1")
        expect(page.locator(".lane")).to_have_count(2)
        expect(page.locator(".says").first).to_contain_text("computed 1")
        assert int(re.sub(r"\D.*", "", page.locator("#n-resident").inner_text().replace(",", ""))) > 60
        page.click(".lane-head >> nth=0")
        expect(page.locator(".words")).to_contain_text("everything was in the cache")


def screenshots(browser: Browser, start: Start, shots: Path) -> None:
    """At three sizes, light and dark, nothing is wider than the window; also at 200 % zoom."""
    with start("-c", "1024", "-np", "4", "--cache-bytes", "40M") as server:
        for name in ("Anna", "Ben", "Cleo"):
            server.chat(
                f"You help {name}, who keeps bees. Say what bees do in winter, in two sentences.",
                server.key,
                max_tokens=40,
            )
        for size in SIZES:
            for scheme in ("light", "dark"):
                with Watched(browser, size, scheme) as watched:
                    page = watched.open(server.page)
                    page.fill("#limit", "60")
                    ask(page, "Name three rivers and say where they flow.")
                    ask(page, "Which of them is the longest?")
                    again(page)
                    page.click(".lane-head >> nth=1")
                    page.locator(".words").wait_for()
                    page.focus("#map-box")
                    page.keyboard.press("ArrowRight")
                    page.keyboard.press("ArrowRight")
                    page.wait_for_timeout(500)
                    page.screenshot(path=shots / f"{size}-{scheme}.png", full_page=True)
                    if (size, scheme) == ("laptop", "light"):
                        page.evaluate("scrollTo(0, 0)")
                        page.set_viewport_size({"width": 1240, "height": 800})
                        page.wait_for_timeout(400)
                        page.screenshot(path=shots / "readme.png")
                        page.set_viewport_size({"width": SIZES[size][0], "height": SIZES[size][1]})
                        assert (shots / "readme.png").stat().st_size < 200_000
                    page.click("[data-view=tree]")
                    page.wait_for_timeout(400)
                    page.screenshot(path=shots / f"{size}-{scheme}-tree.png")
                    fits(page)
                    page.set_viewport_size({"width": SIZES[size][0] // 2, "height": SIZES[size][1] // 2})
                    if size != "phone":
                        fits(page)


def fits(page: Page) -> None:
    wide, room = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= room, f"the page is {wide} pixels wide in a window of {room}"


def accessible(browser: Browser, start: Start, shots: Path) -> None:
    """axe-core finds nothing in any view, light or dark, nor in the form that asks for a key."""
    with start("-c", "1024") as server:
        for scheme in ("light", "dark"):
            with Watched(browser, scheme=scheme) as watched:
                page = watched.open(server.page)
                none_found(page)
                page.fill("#limit", "20")
                ask(page, "Name a river.")
                page.click(".lane-head >> nth=0")
                page.locator(".words").wait_for()
                for view in ("map", "tree", "table"):
                    page.click(f"[data-view={view}]")
                    page.wait_for_timeout(300)
                    none_found(page)
    with start("-c", "512", "--api-key", "secret") as server, Watched(browser) as watched:
        page = watched.open(server.address, "locked")
        none_found(page)
        watched.errors.clear()  # the 401, which the browser reports


def keyboard_alone(browser: Browser, start: Start, shots: Path) -> None:
    """Prompt, lanes, map and table work with the keyboard alone; the map says where one is."""
    with start("-c", "1024") as server, Watched(browser) as watched:
        page = watched.open(server.page)
        page.fill("#limit", "20")
        page.focus("#prompt")
        page.keyboard.type("Name a river.")
        page.keyboard.press("Enter")
        page.locator(".reuse").wait_for(timeout=SECONDS)
        page.focus("#map-box")
        page.keyboard.press("Home")
        expect(page.locator("#detail")).to_contain_text("Block 0: kept")
        page.keyboard.press("End")
        expect(page.locator("#detail")).to_contain_text("is free")
        page.focus(".lane-head")
        page.keyboard.press("Enter")
        expect(page.locator(".words")).to_contain_text("reused 0 of")
        page.focus("[data-view=table]")
        page.keyboard.press("Enter")
        expect(page.locator("#rows tr").first).to_contain_text("system")


def hostile_prompt(browser: Browser, start: Start, shots: Path) -> None:
    """Markup, control characters and marks of direction in a prompt are shown as text, everywhere."""
    with start("-c", "1024") as server, Watched(browser) as watched:
        page = watched.open(server.page)
        page.fill("#limit", "8")
        ask(page, HOSTILE)
        ask(page, HOSTILE.replace("red", "blue"))
        page.click("#new")
        ask(page, "x" + HOSTILE)
        page.click(".lane-head >> nth=0")
        page.locator(".words").wait_for()
        page.click("[data-view=table]")
        expect(page.locator("#rows")).to_contain_text("<script>")
        page.click("[data-view=tree]")
        page.hover("#tree-box", position={"x": 30, "y": 12})
        expect(page.locator(".turn.user").last).to_contain_text("<img src=x onerror=alert(1)>")
        expect(page.locator(".turn.user").last).to_contain_text("\u2039202e\u203a")
        assert page.locator("main img, main script, main svg").count() == 0
        assert "owned" not in page.title()


def both_texts_at_the_split(browser: Browser, start: Start, shots: Path) -> None:
    """The explanation of a request quotes both texts where they part, and says what would help."""
    with start("-c", "1024") as server, Watched(browser) as watched:
        for day in ("Monday", "Tuesday"):
            messages = [
                {"role": "system", "content": f"You are a helpful gardener. Today is {day}."},
                {"role": "user", "content": "Name a flower."},
            ]
            server.chat("", server.key, messages=messages, max_tokens=4)
        page = watched.open(server.page)
        page.click(".lane-head >> nth=0")
        expect(page.locator(".split")).to_contain_text("Monday")
        expect(page.locator(".split")).to_contain_text("Tuesday")
        expect(page.locator(".remedy")).to_be_visible()
        page.screenshot(path=shots / "split.png")


def other_keys_text_is_never_sent(browser: Browser, start: Start, shots: Path) -> None:
    """With two keys, a page shows the numbers of both and the text of its own; no answer to it has the other's."""
    with start("-c", "1024", "--api-key", "alice", "--api-key", "bob") as server, Watched(browser) as watched:
        secret = "The violet elephant sings."
        server.chat(secret, "bob")
        bodies: list[str] = []
        page = watched.page
        page.on("response", lambda r: bodies.append(r.text()) if "/kvarn/" in r.url and "live" not in r.url else None)
        watched.open(f"{server.address}/#key=alice")
        server.chat(secret, "bob", max_tokens=60)
        expect(page.locator(".says").first).to_contain_text("another key")
        page.click(".lane-head >> nth=0")
        expect(page.locator(".lane-body")).to_contain_text("another key")
        page.click("[data-view=table]")
        expect(page.locator("#rows tr").first).to_contain_text("not yours")
        page.click("[data-view=tree]")
        page.hover("#tree-box", position={"x": 30, "y": 12})
        page.wait_for_timeout(400)
        assert "elephant" not in page.content()
        assert not any("elephant" in body for body in bodies)
        connection, stream = server.watch("alice")
        assert b"elephant" not in stream.readline()
        connection.close()


def the_key_stays_here(browser: Browser, start: Start, shots: Path) -> None:
    """The key leaves the address bar, is in no request's address and no log line, survives a reload; a wrong one is
    asked for again."""
    with start("-c", "512", "--api-key", "first") as server, Watched(browser) as watched:
        page = watched.open(server.address, "locked")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#status-text")).to_contain_text("not a key")
        page.fill("#key", "first")
        page.keyboard.press("Enter")
        page.wait_for_selector("#status[data-state=live]")
        page.reload()
        page.wait_for_selector("#status[data-state=live]")
        watched.errors.clear()  # the 401s, which the browser reports
    with start("-c", "512") as server, Watched(browser) as watched:
        page = watched.open(server.page)
        assert page.url == f"{server.address}/"
        assert not any(server.key in address for address in watched.asked if "#" not in address)
        page.fill("#limit", "4")
        ask(page, "Hello")
        server.stop()
        lines = server.log().splitlines()
        assert not any(server.key in line for line in lines[1:]), "the first line prints the address"
        watched.errors.clear()


def policy(browser: Browser, start: Start, shots: Path) -> None:
    """Nothing comes from elsewhere: every request goes to the server itself, and the policy was never violated."""
    with start("-c", "512") as server, Watched(browser) as watched:
        page = watched.page
        page.add_init_script(
            "addEventListener('securitypolicyviolation', e => console.error('violated ' + e.violatedDirective))"
        )
        watched.open(server.page)
        page.fill("#limit", "4")
        ask(page, "Hello")
        for view in ("tree", "table", "map"):
            page.click(f"[data-view={view}]")
        assert all(address.startswith(server.address) for address in watched.asked), watched.asked


def reconnects(browser: Browser, start: Start, shots: Path) -> None:
    """After a restart of the server the page is live again by itself; without API keys it asks for the new address."""
    first = start("-c", "512")
    with Watched(browser) as watched:
        page = watched.open(first.page)
        first.stop()
        page.wait_for_selector("#status[data-state=lost]")
        with start("-c", "512", port=first.port):
            page.wait_for_selector("#status[data-state=live]", timeout=30_000)
            expect(page.locator("#notice")).to_contain_text("new key")
            watched.errors.clear()  # connections refused meanwhile


def twenty_watchers(browser: Browser, start: Start, shots: Path) -> None:
    """Twenty watchers that do not read do not slow an answer; the 21st gets status 429 and the page says so."""
    with start("-c", "1024", "-np", "2") as server:

        def seconds() -> float:
            began = time.monotonic()
            server.chat("Count.", max_tokens=100, ignore_eos=True)
            return time.monotonic() - began

        seconds()
        alone = min(seconds() for _ in range(3))
        watchers = [server.watch() for _ in range(20)]
        assert {response.status for _, response in watchers} == {200}
        slow = min(seconds() for _ in range(3))
        assert slow < 1.25 * alone, f"{slow:.2f} s with watchers, {alone:.2f} s without"
        connection, response = server.watch()
        assert response.status == 429, response.status
        assert "20" in json.loads(response.read())["error"]["message"]
        connection.close()
        with Watched(browser) as watched:
            page = watched.page
            page.goto(server.page)
            expect(page.locator("#status-text")).to_contain_text("twenty pages")
            for connection, response in watchers:
                response.close()
                connection.close()
            page.wait_for_selector("#status[data-state=live]", timeout=30_000)
            watched.errors.clear()  # the 429


def ten_thousand_blocks(browser: Browser, start: Start, shots: Path) -> None:
    """A cache of 10,000 blocks is drawn, and one frame of it takes less than a tenth of a second."""
    with (
        start("-c", "8192", "--block-size", "16", "--cache-bytes", "3600M") as server,
        Watched(browser, "wide") as watched,
    ):
        page = watched.open(server.page)
        total = int(page.locator("#n-resident").inner_text().split(" of ")[1].split(" ")[0].replace(",", "")) // 16
        assert total >= 10_000, total
        page.fill("#limit", "30")
        ask(page, "bee " * 300)
        slowest = page.evaluate(
            "(async () => { const longest = []; new PerformanceObserver(list => list.getEntries().forEach("
            "e => longest.push(e.duration))).observe({type: 'longtask'});"
            "await new Promise(done => setTimeout(done, 3000)); return Math.max(0, ...longest); })()"
        )
        assert slowest < 100, f"a task of {slowest} ms"
        page.screenshot(path=shots / "large.png")


ALL = [
    press_again_and_nothing_is_computed,
    screenshots,
    accessible,
    keyboard_alone,
    hostile_prompt,
    both_texts_at_the_split,
    other_keys_text_is_never_sent,
    the_key_stays_here,
    policy,
    reconnects,
    twenty_watchers,
    ten_thousand_blocks,
]
