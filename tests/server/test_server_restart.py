"""A server with a disk cache forgets nothing at a restart, and survives kill -9 with at most what was resident."""

import signal
import subprocess
import sys
from pathlib import Path

from support.serving import Served, serve, tiny_model
from support.tiers import files

TEXT = [(11 * i) % 250 for i in range(100)]
BODY = {"prompt": TEXT, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "logprobs": 2}


def answer(server: Served, key: str) -> tuple[object, int, dict]:
    """What was answered, how many tokens were reused, and the explanation."""
    found = server.ask("/v1/completions", BODY, key=key).json
    choice = found["choices"][0]
    return (
        (choice["text"], choice["logprobs"]),
        found["usage"]["prompt_tokens_details"]["cached_tokens"],
        found["kvarn"],
    )


def test_conversations_outlast_the_server(tmp_path: Path) -> None:
    model, folder, log = tiny_model(tmp_path), tmp_path / "blocks", tmp_path / "log"
    flags = ("--disk-cache", f"{folder}:1G", "--api-key", "one", "--api-key", "two", "--log-format", "text")
    with serve(model, *flags, log=log) as server:
        assert any(line.startswith("tiers") and str(folder) in line for line in server.summary)
        cold, reused, explained = answer(server, "one")
        assert (reused, explained["fetched"]["disk"]["tokens"]) == (0, 0)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
    assert f"wrote 3 blocks to {folder}" in log.read_text()
    assert len(files(folder)) == 3
    with serve(model, *flags, log=log) as server:
        warm, reused, explained = answer(server, "one")
        assert (warm, reused) == (cold, 96)
        assert explained["fetched"]["disk"]["tokens"] == 96
        assert "(96 from disk, read in " in explained["summary"]
        assert server.metric("kvarn:external_prefix_cache_hits_total") == 96
        assert server.metric("kvarn:kv_tier_reads_total", tier="disk") == 3
        other, reused, _ = answer(server, "two")
        assert (other, reused) == (cold, 0), "the folder knows whose prompt it was"
        server.process.kill()
        server.process.wait(30)
    with serve(model, *flags, log=log) as server:
        assert answer(server, "one")[:2] == (cold, 96)
        assert answer(server, "two")[:2] == (cold, 0), "this was resident only"


def test_a_strategy_without_sharing_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvarn", "run", "-m", str(tiny_model(tmp_path)), "--cache", "ring"]
    ended = subprocess.run([*command, "--disk-cache", str(tmp_path / "d"), "-p", "Hi"], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == (
        "kvarn run: the cache strategy ring shares no prefixes, so nothing could be read back from a host or disk "
        "cache: use paged or sliding\n"
    )
