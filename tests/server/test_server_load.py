"""The server under load: clients that leave or read slowly, full queues, faults, and shutdown."""

import contextlib
import http.client
import json
import signal
import socket
import threading
from pathlib import Path

import pytest
from support.serving import Served, serve, tiny_model

LONG = {"prompt": "abcdefgh" * 6, "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
MANY = LONG | {"n": 16}  # seconds, where LONG may be done within a fifth of one
DEEP = LONG | {"max_tokens": 16000}  # seconds, of one sequence
SHORT = {"prompt": "something short", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("deep"), 16384)


def aborted(server: Served) -> float:
    return server.metric("kvarn:request_success_total", finished_reason="abort")


def test_a_client_that_leaves_frees_its_blocks(model: Path) -> None:
    with serve(model) as server:
        for stream in (True, False):
            before = aborted(server)
            with server.start(MANY) if stream else server.post(MANY):
                server.until(lambda: server.cache()["sequences"])
            server.until_idle()
            cache = server.cache()
            assert (cache["sequences"], cache["blocks"]["used"]) == (0, 0)
            assert aborted(server) == before + 1
        assert server.metric("kvarn:generation_tokens_total") < 2 * 16 * 1500, "nothing more was computed"


def records_of(server: Served, n: int) -> list[dict]:
    """The explanations of n requests, as soon as there are so many."""
    server.until(lambda: len(server.ask("/kvarn/requests").json["data"]) == n)
    return server.ask("/kvarn/requests").json["data"]


def test_a_request_that_was_left_can_be_explained(deep: Path, capsys: pytest.CaptureFixture) -> None:
    from kvarn.cli import main

    with serve(deep, "-c", "16384", "-np", "1") as server:
        with server.start(DEEP):
            with server.post(SHORT):
                server.until(lambda: server.metric("kvarn:num_requests_waiting"))
            (waited,) = records_of(server, 1)
        answered = records_of(server, 2)[0]
        assert (waited["reuse_ended"], waited["recomputed_tokens"], waited["queued_ms"]) == (None, 0, None)
        assert waited["summary"] == "cancelled while queued: nothing was looked up or computed"
        assert answered["prompt_tokens"] == answered["recomputed_tokens"]
        assert answered["summary"].endswith("; cancelled during its answer")
        for record, line in ((waited, "while queued"), (answered, "during its answer")):
            assert main(["explain", record["id"], "--url", server.url]) == 0
            assert f"\n  cancelled  {line}" in capsys.readouterr().out
        assert server.ask("/v1/completions", SHORT).json["kvarn"]["cancelled"] is False


def test_a_full_queue_answers_429_with_retry_after(deep: Path) -> None:
    flags = ("-c", "16384", "-np", "1", "--queue", "2")
    with serve(deep, *flags) as server, server.post(SHORT) as first, server.post(SHORT) as second:
        assert first.response.read()
        assert second.response.read()
        with server.start(DEEP):
            third, fourth = server.post(SHORT), server.post(SHORT)
            server.until(lambda: server.metric("kvarn:num_requests_waiting") == 2)
            reply = server.ask("/v1/completions", SHORT)
            assert reply.status == 429
            assert "the queue is full (1 running, 2 waiting)" in reply.error
            assert 1 <= int(reply.headers["retry-after"]) <= 60
            assert reply.json["error"]["type"] == "rate_limit_error"
        with third, fourth:
            assert third.response.status == fourth.response.status == 200, "those that waited are served in turn"
            assert third.response.read()
            assert fourth.response.read()
        assert server.ask("/v1/completions", SHORT).status == 200


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system cannot bound it")
def test_the_connection_of_a_client_that_does_not_read_is_closed(model: Path) -> None:
    """The request is cancelled, and the connection too: closing would wait for what is in the system's buffers."""
    with serve(model, "--reader-seconds", "1", "--drain-seconds", "600") as server, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((server.host, server.port))
        body = json.dumps(MANY | {"logprobs": 5, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        reader.sendall(head.encode() + body)
        server.until(lambda: server.cache()["sequences"])
        server.until_idle()
        assert server.stop() == 0, "it would wait for ten minutes otherwise"


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
    with serve(model, "--drain-seconds", "0") as server, server.start(MANY) as answer:
        assert server.stop() == 0
        with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
            assert b"[DONE]" not in answer.response.read()


def test_the_first_sigint_waits_for_answers_and_the_second_does_not(deep: Path) -> None:
    """One sequence at a time. Two calls wait in the queue at the first signal: the one is answered, the other cut."""
    flags = ("-c", "16384", "-np", "1", "--drain-seconds", "600")
    with serve(deep, *flags) as server, server.start(DEEP) as running, server.post(SHORT) as answered:
        server.until(lambda: server.metric("kvarn:num_requests_waiting") == 1)
        cut = server.post(DEEP | {"stream": True})
        server.until(lambda: server.metric("kvarn:num_requests_waiting") == 2)
        server.process.send_signal(signal.SIGINT)
        server.until(lambda: refuses_connections(server))
        running.leave()
        assert answered.response.status == 200
        assert answered.response.read()
        assert cut.response.status == 200, "it is under way"
        assert server.stop(signal.SIGINT) == 0
        with cut, contextlib.suppress(http.client.IncompleteRead, ConnectionError):
            assert b"[DONE]" not in cut.response.read()


def refuses_connections(server: Served) -> bool:
    try:
        socket.create_connection((server.host, server.port), timeout=60).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_port_in_use_is_reported_in_one_line(model: Path, capsys: pytest.CaptureFixture) -> None:
    from kvarn.cli import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "-m", str(model), "--port", port]) == 1
    error = capsys.readouterr().err
    assert error == f"kvarn serve: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
    assert main(["serve", "-m", str(model), "-np", "600"]) == 1
    assert "raise -b above -np" in capsys.readouterr().err


def test_concurrent_answers_equal_those_of_requests_alone(model: Path) -> None:
    """24 clients on a cache that forces preemptions; every answer equals that of the same request alone."""
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
