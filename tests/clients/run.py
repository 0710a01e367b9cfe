"""Real clients against a real server: starts `kvarn serve`, runs each client, writes docs/clients.md.

    python tests/clients/run.py [NAME ...]

`make test-clients` makes the environments first. Each client runs in its own environment and process. The exit
status is 1 if a row that should work does not, or if a refusal is not a 400 or 404 that says why. With names only
those clients run, and the page has the last results of the others. It is written if no client has a fault.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / "build" / "clients"
SECONDS = 600  # for one client
HEAD = """# Clients

Programs and libraries that were run against `kvarn serve -m smollm2`, with kvarn {version}. This
page is written by `make test-clients`, which fails if something that works here stops working.

"Refused" means: the server answers with status 400 or 404 and an error in the protocol's format that
says what is not implemented. Nothing is silently ignored. The messages are those of the server's log.

"""


class Client(NamedTuple):
    title: str
    module: str
    environment: str = "main"
    note: str = ""


CLIENTS = [
    Client("openai", "openai_sdk"),
    Client("openai (Responses API)", "openai_responses"),
    Client(
        "openai (types)",
        "openai_types",
        note="every answer and event, validated strictly, and by OpenAI's OpenAPI document if OPENAPI has its path",
    ),
    Client("langchain-openai", "langchain_sdk"),
    Client("langchain-ollama", "langchain_ollama_sdk"),
    Client("llm (command line)", "llm_cli"),
    Client("litellm", "litellm_sdk", "litellm"),
    Client("instructor", "instructor_sdk"),
    Client("pydantic-ai", "pydantic_ai_sdk"),
    Client("openai-agents", "openai_agents"),
    Client(
        "Codex CLI",
        "codex_cli",
        note="the program itself, from npm, against a model that writes given texts, because small models do not call "
        "its tools",
    ),
    Client("outlines (`from_openai`)", "outlines_sdk"),
    Client("guidance (`models.OpenAI`)", "guidance_sdk"),
    Client("anthropic", "anthropic_sdk"),
    Client("ollama", "ollama_sdk"),
    Client("httpx, aiohttp, curl", "plain_http"),
    Client(
        "guidellm",
        "guidellm_cli",
        "guidellm",
        "without torch, which it needs only to read its prompts: a small module takes the place of torch's DataLoader",
    ),
    Client(
        "lm-eval",
        "lm_eval_cli",
        "lm_eval",
        "with the model's tokenizer in a local folder; the log-probabilities are those of kvarn's Python API",
    ),
    Client("Prometheus", "prometheus_server"),
]


def run_client(client: Client, address: str, log: Path) -> list[dict]:
    python = ENVIRONMENTS / client.environment / "bin" / "python"
    command = [str(python), str(HERE / f"{client.module}.py"), address, str(log)]
    environment = os.environ | {"KVARN_PYTHON": sys.executable}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"versions"')]
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no word"])[-1]
        rows.append({"row": "all", "expected": "works", "result": "fault", "how": said, "versions": {}})
    for row in rows:
        mark = {"works": "ok", "refused": "ok, refused", "fault": "FAULT"}[row["result"]]
        print(f"{client.title:<28} {mark:<12} {row['row']}{': ' + row['how'] if mark != 'ok' else ''}", flush=True)
    return rows


def page(results: dict[Client, list[dict]], version: str) -> str:
    lines = [HEAD.format(version=version), "| client | version | works | refused |\n|---|---|---|---|\n"]
    for client, rows in results.items():
        worked, said_no = ([row["row"] for row in rows if row["result"] == kind] for kind in ("works", "refused"))
        versions = ", ".join(rows[0]["versions"].values())
        lines.append(f"| {client.title} | {versions} | {len(worked) or ''} | {'; '.join(said_no)} |\n")
    for client, rows in results.items():
        lines.append(f"\n## {client.title}\n\n{section(client, rows)}")
    return "".join(lines)


def section(client: Client, rows: list[dict]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in rows[0]["versions"].items())
    parts = [fill(f"{versions}; {client.note}." if client.note else f"{versions}.", 100) + "\n"]
    if worked := [row["row"] for row in rows if row["result"] == "works"]:
        parts.append("Works:\n\n" + "".join(f"- {name}\n" for name in worked))
    if said_no := [row for row in rows if row["result"] == "refused"]:
        table = "".join(f"| {row['row']} | {row['how']} |\n" for row in said_no)
        parts.append(f"| refused | status and message |\n|---|---|\n{table}")
    return "\n".join(parts)


def main(names: list[str]) -> int:
    chosen = [client for client in CLIENTS if not names or client.module in names]
    kvarn = [sys.executable, "-m", "kvarn"]
    version = subprocess.run([*kvarn, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        flags = ("-m", "smollm2", "-c", "2048", "--port", "0", "--log-format", "json", "--metrics-prefix", "vllm")
        with log.open("w") as errors:
            server = subprocess.Popen([*kvarn, "serve", *flags], stderr=errors)
        try:
            address = started(server, log)
            results = {client: rows for client in chosen if (rows := run_client(client, address, log))}
        finally:
            server.terminate()
            server.wait()
    for client, rows in results.items():
        (ENVIRONMENTS / f"{client.module}.json").write_text(json.dumps(rows))
    last = last_results()
    if len(last) == len(CLIENTS) and not any(map(faults_in, last.values())):
        (ROOT / "docs" / "clients.md").write_text(page(last, version))
    n_rows, n_faults = sum(map(len, results.values())), sum(len(faults_in(rows)) for rows in results.values())
    print(f"{n_rows - n_faults} passed, {n_faults} failed")
    return 1 if n_faults else 0


def faults_in(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["result"] == "fault"]


def last_results() -> dict[Client, list[dict]]:
    kept = {client: ENVIRONMENTS / f"{client.module}.json" for client in CLIENTS}
    return {client: json.loads(path.read_text()) for client, path in kept.items() if path.exists()}


def started(server: subprocess.Popen, log: Path) -> str:
    """The address, when the server is there."""
    while True:
        try:
            server.wait(0.1)
        except subprocess.TimeoutExpired:
            lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"time"')]
            if lines:
                return lines[0]["address"].removesuffix("/v1")
        else:
            sys.exit(f"the server did not start: {log.read_text()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
