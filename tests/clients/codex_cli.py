"""Codex CLI: one task of an agent, with a call that Codex runs, and the cache behind it."""

import json
import os
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rows import run, works

HERE = Path(__file__).resolve().parent
INSTALLED = HERE.parents[1] / "build" / "clients" / "codex" / "node_modules" / ".bin"
PROGRAM = shutil.which("codex", path=f"{os.environ['PATH']}:{INSTALLED}")
TEXTS = {
    "call": "<think>\nI run it.\n</think>\n\nI look.\n<tool_call>\n"
    '{"name": "exec_command", "arguments": {"cmd": "echo play text"}}\n</tool_call>',
    "text": "<think>\nIt worked.\n</think>\n\nAll is well.",
}
CONFIG = """\
model = "tiny"
model_provider = "kvarn"
model_context_window = 65536
model_providers.kvarn = {{ name = "kvarn", base_url = "{address}/v1" }}
"""


@contextmanager
def scripted(folder: str) -> Iterator[str]:
    """The address of a server whose model writes TEXTS."""
    command = [os.environ["KVARN_PYTHON"], str(HERE / "stand_in" / "scripted_server.py"), folder, json.dumps(TEXTS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()


def agent(address: str) -> None:
    urllib.request.urlopen(f"{address}/v1/models", timeout=60).close()  # a line in the log
    with tempfile.TemporaryDirectory() as folder, scripted(folder) as own:
        (Path(folder) / "config.toml").write_text(CONFIG.format(address=own))
        work = Path(folder) / "work"
        work.mkdir()
        command = [PROGRAM, "exec", "--json", "--skip-git-repo-check", "--sandbox", "read-only", "play call"]
        environment = os.environ | {"CODEX_HOME": folder}
        done = subprocess.run(
            command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
        events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    said = [e["item"]["text"] for e in events if e["type"] == "item.completed" and e["item"]["type"] == "agent_message"]
    assert said == ["I look.", "All is well."], done.stdout[-500:] + done.stderr[-500:]
    ran = [e["item"] for e in events if e["type"] == "item.completed" and e["item"]["type"] == "command_execution"]
    assert [(each["aggregated_output"], each["exit_code"]) for each in ran] == [("play text\n", 0)]
    usage = events[-1]["usage"]
    assert usage["reasoning_output_tokens"] > 0
    new = usage["input_tokens"] - 2 * usage["cached_input_tokens"]  # of both requests: all that was not there before
    assert 0 < new < 1000 < usage["cached_input_tokens"]


if __name__ == "__main__":
    if PROGRAM is None:
        print("Codex is not installed")
    else:
        number = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
        rows = [works("codex exec: a command is called, run and answered; the second request is in the cache", agent)]
        run((), rows, {"codex": number})
