"""`kvarn bench serve` against our own server, and its sums by hand."""

import json
from collections.abc import Iterator
from itertools import islice

import pytest
from support.serving import Served, serve, tiny_model

from kvarn.bench.load.client import Outcome
from kvarn.bench.load.report import parse_goal, summarize
from kvarn.bench.load.traffic import Traffic
from kvarn.cli import main


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tiny_model(tmp_path_factory.mktemp("model")), "--alias", "tiny", "-np", "4") as served:
        yield served


FLAGS = ["--requests", "12", "--input-len", "40", "--output-len", "6", "--shared-prefix-len", "32", "--seed", "3"]


@pytest.mark.parametrize("how", [["--concurrency", "3"], ["--rate", "200"], ["--text"]])
def test_counts_are_exact(server: Served, how: list[str], capsys: pytest.CaptureFixture) -> None:
    flags = [*FLAGS, *how, "--url", server.url, "--json", "--goodput", "ttft:60000", "tpot:60000"]
    assert main(["bench", "serve", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["completed"], report["errors"]) == (12, 12, {})
    assert report["output_tokens"] == 12 * 6
    if "--text" not in how:
        assert report["prompt_tokens"] == 12 * 40
        assert report["cached_tokens"] >= 6 * 32
    assert report["goodput"]["share"] == 1
    for name in ("ttft", "tpot", "itl", "e2e"):
        spread = report[f"{name}_ms"]
        assert 0 <= spread["median"] <= spread["p99"] <= spread["max"]


def test_the_report_as_a_table(server: Served, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "serve", *FLAGS, "--url", server.url + "/v1", "--goodput", "ttft:0.001"]) == 0
    text = capsys.readouterr().out
    for fact in ("12 of 12 in ", "480 of prompts", "72 of answers", "0 % within ttft 0.001 ms", "first token (ttft)"):
        assert fact in text


def test_refusals_are_counted_and_not_hidden(server: Served, capsys: pytest.CaptureFixture) -> None:
    flags = ["--requests", "2", "--input-len", "4000", "--output-len", "5", "--url", server.url]
    assert main(["bench", "serve", *flags]) == 1
    captured = capsys.readouterr()
    assert "0 of 2 in " in captured.out
    assert captured.err.startswith("kvarn bench serve: no request was completed: status 400 (the prompt has ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--url", "http://127.0.0.1:1"], "does not answer"),
        (["--url", "ftp://x"], "give one like http://127.0.0.1:8000"),
        (["--rate", "0"], "a rate of 0.0 per second"),
        (["--requests", "0"], "requests is 0; it must be at least 1"),
        (["--shared-prefix-len", "500"], "does not fit an input of 128"),
    ],
)
def test_bad_flags_get_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "serve", *flags]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_report_of_known_latencies() -> None:
    """Two requests of three tokens: first after 100 and 300 ms, then every 50 and 150 ms; a third failed."""
    outcomes = [
        Outcome(0.0, [0.1, 0.15, 0.2], 0.2, prompt_tokens=10, cached_tokens=4, output_tokens=3),
        Outcome(0.5, [0.8, 0.95, 1.1], 1.1, prompt_tokens=10, output_tokens=3),
        Outcome(1.0, [], 2.0, error="status 429"),
    ]
    report = summarize(outcomes, parse_goal(["ttft:200", "tpot:60"]))
    assert report["seconds"] == 2.0
    assert report["output_tokens_per_second"] == 3.0
    assert report["total_tokens_per_second"] == 13.0
    assert report["ttft_ms"]["mean"] == pytest.approx(200)
    assert report["tpot_ms"]["median"] == pytest.approx(100)
    assert report["itl_ms"]["max"] == pytest.approx(150)
    assert report["e2e_ms"]["mean"] == pytest.approx(400)
    assert report["goodput"] == {
        "goal_ms": {"ttft": 200, "tpot": 60},
        "requests_per_second": 0.5,
        "share": pytest.approx(1 / 3),
    }
    assert report["errors"] == {"status 429": 1}


def test_the_same_seed_gives_the_same_traffic() -> None:
    traffic = Traffic(5, 10.0, None, input_len=20, output_len=1, shared_prefix_len=8, seed=9)
    assert list(traffic.bodies("m")) == list(traffic.bodies("m"))
    prompts = [body["prompt"] for body in traffic.bodies("m")]
    assert all(len(prompt) == 20 and prompt[:8] == prompts[0][:8] for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) == 5
    pauses = list(islice(traffic.pauses(), 1000))
    assert sum(pauses) / 1000 == pytest.approx(0.1, rel=0.1)
