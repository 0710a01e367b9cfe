"""The page in a real browser: starts `kvarn serve`, drives Chromium, writes the table in docs/page.md.

    python tests/page/run.py [NAME ...]

`make test-page` makes the environment first: Playwright from PyPI with the system's Chromium, axe-core from npm.
Screenshots go to build/page/shots; the one of README is docs/images/page.png. With names only those checks run,
and nothing is written.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import checks
from playwright.sync_api import Browser, sync_playwright
from server import ROOT, Server

SHOTS = ROOT / "build" / "page" / "shots"
PAGE = ROOT / "docs" / "page.md"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"


def chromium() -> str:
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if not found:
        sys.exit("no Chromium found: apt-get install chromium, or set CHROMIUM to its path")
    return found


def run(check: Callable, browser: Browser, folder: Path) -> str:
    """An empty text, or what went wrong."""
    try:
        check(browser, lambda *flags, **kw: Server(folder, *flags, **kw), SHOTS)
    except Exception as error:  # noqa: BLE001 (it is a line of the report)
        return f"{type(error).__name__}: {error}".strip()
    return ""


def main(names: list[str]) -> int:
    chosen = [check for check in checks.ALL if not names or check.__name__ in names]
    SHOTS.mkdir(parents=True, exist_ok=True)
    rows, failed = [], 0
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for check in chosen:
            began = time.monotonic()
            problem = run(check, browser, Path(folder))
            what = " ".join((check.__doc__ or "").split())
            failed += bool(problem)
            print(
                f"{'FAULT' if problem else 'ok':<6} {time.monotonic() - began:5.1f} s  {check.__name__}  {problem}",
                flush=True,
            )
            rows.append(f"| {check.__name__.replace('_', ' ')} | {what} |\n")
        version = browser.version
        browser.close()
    print(f"{len(chosen) - failed} passed, {failed} failed; screenshots in {SHOTS.relative_to(ROOT)}")
    if not failed and not names:
        write(rows, version)
    return 1 if failed else 0


def write(rows: list[str], version: str) -> None:
    axe = subprocess.run(
        ["node", "-p", "require('./build/page/node_modules/axe-core/package.json').version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    head = f"Chromium {version}, axe-core {axe}: all of these hold.\n\n| check | what holds |\n|---|---|\n"
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + head + "".join(rows) + END, text, flags=re.S))
    shutil.copy(SHOTS / "readme.png", ROOT / "docs" / "images" / "page.png")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
