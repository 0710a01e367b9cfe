"""Runs the rows of one client, in the client's own environment, and prints one JSON object for each.

    python tests/clients/NAME.py ADDRESS LOG

ADDRESS is that of a server without keys, LOG the file of its request log (--log-format json). A row works if its
function returns, and is refused if the function raises and the log has a 400 or a 404 for it. Anything else is a
fault. Needs nothing but Python.
"""

import json
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

MODEL = "smollm2"
QUESTION = "What is the capital of France?"
SHORT = "What is the capital of France? Answer with one word."  # the answer ends within 20 tokens
ASKED = [{"role": "user", "content": QUESTION}]
FOX = "The quick brown fox"
REFUSED = (400, 404)


@cache
def answer(address: str, max_tokens: int = 20, question: str = QUESTION) -> str:
    """The answer to the question at temperature 0, asked without any client. It has the same bits every time."""
    asked = [{"role": "user", "content": question}]
    return _ask(address, "chat/completions", messages=asked, max_tokens=max_tokens)["message"]["content"]


@cache
def continued(address: str, max_tokens: int = 5) -> str:
    """The same for the completion of FOX."""
    return _ask(address, "completions", prompt=FOX, max_tokens=max_tokens)["text"]


def _ask(address: str, path: str, **fields: object) -> dict:
    body = json.dumps({"model": MODEL, "temperature": 0} | fields).encode()
    with urllib.request.urlopen(f"{address}/v1/{path}", body, timeout=60) as reply:
        return json.loads(reply.read())["choices"][0]


class Row(NamedTuple):
    name: str
    call: Callable[[str], object]  # takes the address
    refused: bool = False


def works(name: str, call: Callable[[str], object]) -> Row:
    return Row(name, call)


def refused(name: str, call: Callable[[str], object]) -> Row:
    return Row(name, call, refused=True)


class LogFile:
    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._seen = len(self._lines())

    def new(self) -> list[dict]:
        """The requests since the last call. Lines come a moment after their answers."""
        end = time.monotonic() + 5
        while len(found := self._lines()[self._seen :]) == 0 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.05)  # a row may send several requests
        found = self._lines()[self._seen :]
        self._seen += len(found)
        return found

    def _lines(self) -> list[dict]:
        lines = [json.loads(line) for line in self._path.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if line["event"] == "request"]


def judge(row: Row, error: BaseException | None, asked: list[dict]) -> dict:
    said = [f"{line['status']} {line['error']}" for line in asked if line["status"] in REFUSED]
    broken = [line for line in asked if line["status"] >= 500]
    facts = {"row": row.name, "expected": "refused" if row.refused else "works", "how": said[0] if said else ""}
    if broken or (error is None) == row.refused or (row.refused and not said):
        fault = traceback.format_exception(error)[-1].strip() if error is not None else "it was not refused"
        return facts | {"result": "fault", "how": f"{fault}; the server's log: {said or broken or asked[:3]}"[:600]}
    return facts | {"result": facts["expected"]}


def run(packages: tuple[str, ...], rows: list[Row], other: dict[str, str] | None = None) -> None:
    """`other`: versions of what is no Python package."""
    address, log = sys.argv[1], LogFile(sys.argv[2])
    versions = {name: version(name) for name in packages} | (other or {})
    for row in rows:
        error: BaseException | None = None
        try:
            row.call(address)
        except Exception as raised:  # noqa: BLE001 (judged)
            error = raised
        print(json.dumps({"versions": versions} | judge(row, error, log.new())), flush=True)
