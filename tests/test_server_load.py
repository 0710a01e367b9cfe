"""The server under people: those who leave, those who read slowly, too many at once, faults, and the end."""

import contextlib
import http.client
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from serving import Served, serve, tiny_model

LONG = {"prompt": "abcdefgh" * 6, "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "something short", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def aborted(server: Served) -> float:
    return server.metric("kvarn:request_success_total", finished_reason="abort")


def test_who_leaves_frees_what_they_held(model: Path) -> None:
    with serve(model) as server:
        for stream in (True, False):
            before = aborted(server)
            with server.start(LONG) if stream else server.post(LONG):
                while not server.cache()["sequences"]:
                    time.sleep(0.01)
            server.until_idle()
            cache = server.cache()
            assert (cache["sequences"], cache["blocks"]["used"]) == (0, 0)
            assert aborted(server) == before + 1
        assert server.metric("kvarn:generation_tokens_total") < 2 * 1500, "nobody computed for those who left"


def told_of_cancelled(server: Served, n: int) -> list[dict]:
    """What is kept of the last n requests, once all are known to be cancelled."""
    for _ in range(2000):
        told = server.ask("/kvarn/requests").json["data"][:n]
        if len(told) == n and all(each["cancelled"] for each in told):
            return told
        time.sleep(0.01)
    raise AssertionError(told)


def test_who_left_can_ask_what_had_taken_so_long(model: Path, capsys: pytest.CaptureFixture) -> None:
    from kvarn.cli import main

    with serve(model, "-np", "1", "--chunk", "16") as server:
        with server.start(LONG):
            with server.post(SHORT):
                while not server.metric("kvarn:num_requests_waiting"):
                    time.sleep(0.01)
            (waited,) = told_of_cancelled(server, 1)
        answered = told_of_cancelled(server, 2)[0]
        assert (waited["stop"], waited["recomputed_tokens"], waited["queued_ms"]) == (None, 0, None)
        assert waited["summary"] == "cancelled before its turn came: nothing was looked up or computed"
        assert answered["prompt_tokens"] == answered["recomputed_tokens"]
        assert answered["summary"].endswith("; cancelled during its answer")
        for told, line in ((waited, "before its turn came"), (answered, "during its answer")):
            assert main(["explain", told["id"], "--url", server.url]) == 0
            assert f"\n  cancelled  {line}" in capsys.readouterr().out
        assert server.ask("/v1/completions", SHORT).json["kvarn"]["cancelled"] is False


def test_more_than_may_wait_are_told_when_to_come_again(model: Path) -> None:
    with serve(model, "-np", "1", "--queue", "2") as server, server.post(SHORT) as first, server.post(SHORT) as second:
        assert first.response.read()
        assert second.response.read()
        with server.start(LONG):
            third, fourth = server.post(SHORT), server.post(SHORT)
            while server.metric("kvarn:num_requests_waiting") < 2:
                time.sleep(0.01)
            reply = server.ask("/v1/completions", SHORT)
            assert reply.status == 429
            assert "1 sequences run and 2 wait" in reply.error
            assert 1 <= int(reply.headers["retry-after"]) <= 60
            assert reply.json["error"]["type"] == "rate_limit_error"
        with third, fourth:
            assert third.response.status == fourth.response.status == 200, "those who waited are served in turn"
            assert third.response.read()
            assert fourth.response.read()
        assert server.ask("/v1/completions", SHORT).status == 200


def test_sigterm_lets_answers_finish(model: Path) -> None:
    with serve(model) as server, server.start(LONG | {"max_tokens": 300}) as answer:
        server.process.send_signal(signal.SIGTERM)
        text = answer.response.read().decode()
        assert text.rstrip().endswith("data: [DONE]"), "the answer under way came to its end"
        assert '"finish_reason":"length"' in text
        assert server.process.wait(timeout=60) == 0
        with pytest.raises(OSError):
            server.ask("/health")
        assert server.process.stderr.read() == ""


def test_the_drain_is_bounded(model: Path) -> None:
    with serve(model, "--drain-seconds", "0") as server, server.start(LONG) as answer:
        assert server.stop() == 0
        with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
            assert b"[DONE]" not in answer.response.read()


def test_sigint_twice_stops_at_once(model: Path) -> None:
    with serve(model, "--drain-seconds", "600") as server, server.start(LONG | {"n": 16}):
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert server.process.poll() is None, "it waits for the answer"
        assert server.stop(signal.SIGINT) == 0


def test_a_port_in_use_is_one_line(model: Path, capsys: pytest.CaptureFixture) -> None:
    from kvarn.cli import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "-m", str(model), "--port", port]) == 1
    error = capsys.readouterr().err
    assert error == f"kvarn: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
    assert main(["serve", "-m", str(model), "-np", "600"]) == 1
    assert "raise -b above -np" in capsys.readouterr().err


def test_many_at_once_get_what_each_gets_alone(model: Path) -> None:
    """24 callers over HTTP on a cache that forces preemptions; every answer equals the one asked for alone."""
    bodies = [
        {
            "prompt": ("abcdefgh" * 9)[: 20 + 2 * i],
            "max_tokens": 40,
            "temperature": 1.2 * (i % 2),
            "seed": i,
            "logprobs": 2,
        }
        for i in range(24)
    ]
    with serve(model, "--cache-bytes", "260K", "-np", "6", "-b", "128", "--chunk", "16", "-c", "256") as server:
        answers: dict[int, dict] = {}

        def ask(i: int) -> None:
            answers[i] = server.ask("/v1/completions", bodies[i]).json["choices"][0]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.metric("kvarn:num_preemptions_total") > 0
        assert server.metric("kvarn:prefix_cache_hits_total") > 0
        server.until_idle()
        assert server.cache()["blocks"]["used"] == 0
    with serve(model, "-np", "1", "-c", "256", "--cache", "contiguous") as fresh:
        for i, body in enumerate(bodies):
            assert answers[i] == fresh.ask("/v1/completions", body).json["choices"][0], i
