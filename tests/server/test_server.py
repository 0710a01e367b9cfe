"""The server as its callers see it, on a tiny model: endpoints, fields, isolation, explanations."""

from collections.abc import Iterator

import pytest
from support.serving import Served, serve, tiny_model

from kvarn.cli import main

COMPLETION = {"prompt": "abcdefgh" * 8, "max_tokens": 6, "temperature": 0}
TALK = [{"role": "user", "content": "Say something, please."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny_model(tmp_path_factory.mktemp("model"))
    with serve(model, "--alias", "tiny", "--api-key", "alice", "--api-key", "bob") as served:
        yield served


def test_the_summary_at_start_up(server: Served) -> None:
    text = "\n".join(server.summary)
    names = [line.split()[0] for line in server.summary]
    assert names == ["model", "backend", "cache", "serving", "keys", "page", "address"]
    for fact in ("tiny", "paged", "bf16", "weights 1.3 MiB", "workspace ", "16,384 tokens", "2 API keys", server.url):
        assert fact in text
    assert "\nbackend  cpu, isa " in text
    assert " (auto: no NVIDIA device)\n" in text


def test_read_only_endpoints(server: Served) -> None:
    assert server.ask("/health").json == {"status": "ok"}
    assert server.ask("/ready").json == {"status": "ready"}
    (model,) = server.ask("/v1/models", key="alice").json["data"]
    assert model["id"] == "tiny"
    assert server.ask("/v1/models/tiny", key="alice").json == model
    assert server.ask("/v1/models/other", key="alice").status == 404
    assert server.ask("/openapi.json").json["openapi"] == "3.1.0"


def test_tokenize_and_detokenize(server: Served) -> None:
    found = server.ask("/tokenize", {"prompt": "abcdx é"}, "alice").json
    assert found["count"] == len(found["tokens"]) == 6, "ab, cd, x, a space, two bytes"
    assert server.ask("/detokenize", {"tokens": found["tokens"]}, "alice").json["prompt"] == "abcdx é"
    chat = server.ask("/tokenize", {"messages": TALK}, "alice").json["tokens"]
    rendered = "<user>Say something, please.\n<assistant>"
    assert server.ask("/detokenize", {"tokens": chat}, "alice").json["prompt"] == rendered


def test_a_key_is_needed_where_there_are_keys(server: Served) -> None:
    for key, message in ((None, "give an API key"), ("mallory", "not one of this server's"), ("", "give an API key")):
        reply = server.ask("/v1/completions", COMPLETION, key)
        assert reply.status == 401
        assert message in reply.error
        assert reply.headers["www-authenticate"] == "Bearer"
        assert server.ask("/kvarn/cache", key=key).status == 401


def test_streamed_and_whole_are_the_same(server: Served) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", {"messages": TALK, "max_tokens": 9})):
        body = body | {"seed": 4, "temperature": 1.5, "n": 3, "logprobs": 2 if "prompt" in body else True}
        whole = server.ask(path, body, "alice").json
        events = server.ask(path, body | {"stream": True}, "alice").events
        for choice in whole["choices"]:
            pieces = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
            if "prompt" in body:
                assert "".join(piece["text"] for piece in pieces) == choice["text"]
                for name in ("tokens", "token_logprobs", "text_offset"):
                    joined = [x for piece in pieces for x in piece["logprobs"][name]]
                    assert joined == choice["logprobs"][name]
            else:
                assert pieces[0]["delta"] == {"role": "assistant", "content": None}
                assert pieces[-1]["delta"] == {}, "only a finish_reason"
                text = "".join(piece["delta"]["content"] for piece in pieces[1:] if piece["delta"])
                assert text == choice["message"]["content"]
                content = [x for piece in pieces if piece["logprobs"] for x in piece["logprobs"]["content"]]
                assert content == choice["logprobs"]["content"]
            assert [piece["finish_reason"] for piece in pieces][-1] == choice["finish_reason"]
        assert all(event["choices"] for event in events), "no empty chunk where usage was not asked for"
        assert "usage" not in events[-1]
        assert events[-1]["kvarn"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_usage_at_the_end_of_a_stream(server: Served) -> None:
    body = COMPLETION | {"stream": True, "stream_options": {"include_usage": True}}
    last = server.ask("/v1/completions", body, "alice").events[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == last["kvarn"]["reused_tokens"]


def test_every_kind_of_prompt(server: Served) -> None:
    ids = server.ask("/tokenize", {"prompt": COMPLETION["prompt"]}, "alice").json["tokens"]
    text = server.ask("/v1/completions", COMPLETION, "alice").json["choices"][0]["text"]
    one = server.ask("/v1/completions", COMPLETION | {"prompt": ids}, "alice").json
    assert [choice["text"] for choice in one["choices"]] == [text]
    several = server.ask("/v1/completions", COMPLETION | {"prompt": [ids, ids[:5]], "n": 2}, "alice").json
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in several["choices"][:2]] == [text, text]
    assert several["usage"]["prompt_tokens"] == len(ids) + 5
    assert [prompt["prompt_tokens"] for prompt in several["kvarn"]["prompts"]] == [len(ids), 5]
    texts = server.ask("/v1/completions", COMPLETION | {"prompt": [COMPLETION["prompt"], "x"]}, "alice").json
    assert texts["choices"][0]["text"] == text
    parts = [{"role": "user", "content": [{"type": "text", "text": "Say something, please."}]}]
    answers = [
        server.ask("/v1/chat/completions", {"messages": m, "max_tokens": 5, "temperature": 0}, "alice").json
        for m in (TALK, parts)
    ]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_fields_do_what_they_say(server: Served) -> None:
    def text(**fields: object) -> str:
        return server.ask("/v1/completions", COMPLETION | {"max_tokens": 12} | fields, "alice").json["choices"][0]

    plain = text()
    assert (plain["finish_reason"], text(top_k=1, temperature=2)["text"]) == ("length", plain["text"])
    assert (
        text(seed=1, temperature=3)["text"]
        == text(seed=1, temperature=3)["text"]
        != text(seed=2, temperature=3)["text"]
    )
    part = plain["text"][3:5]
    stopped = text(stop=[part, "never"])
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == plain["text"][: plain["text"].index(part)]
    biased = text(logit_bias={"97": 100})
    assert set(biased["text"]) == {"a"}
    assert text(stop_token_ids=[97], logit_bias={"97": 100})["finish_reason"] == "stop"
    assert set(text(logit_bias={"97": 100}, repetition_penalty=100)["text"]) != {"a"}
    assert text(min_p=1, temperature=5)["text"] == plain["text"]
    assert text(frequency_penalty=2, presence_penalty=2, temperature=0)["text"] != biased["text"]


def test_explain_in_the_answer_and_afterwards(server: Served, capsys: pytest.CaptureFixture) -> None:
    body = {"prompt": "The cat sat on the mat and looked at the moon.", "max_tokens": 2, "temperature": 0}
    first = server.ask("/v1/completions", body, "alice").json
    assert first["kvarn"]["reuse_ended"]["reason"] in ("nothing shared", "differs")
    body["prompt"] = body["prompt"].replace("moon", "star")
    second = server.ask("/v1/completions", body, "alice").json
    found = second["kvarn"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == found["reused_tokens"] == 41
    assert found["reuse_ended"]["reason"] == "differs"
    assert found["reuse_ended"]["at"] == 41
    assert found["reuse_ended"]["before"] == " at the "
    assert found["reuse_ended"]["ours"]["onward"] == "star."
    assert found["reuse_ended"]["theirs"]["onward"].startswith("moon.")
    path = f"/kvarn/requests/{second['id']}"
    assert server.ask(path, key="alice").json == found
    assert server.ask("/kvarn/requests", key="alice").json["data"][:2] == [found, first["kvarn"]]
    for key, status in (("bob", 404), (None, 401)):
        refused = server.ask(path, key=key)
        assert refused.status == status
        assert "star" not in refused.body.decode()
    assert main(["explain", second["id"], "--url", server.url, "--api-key", "alice"]) == 0
    shown = capsys.readouterr().out
    for fact in ("46 tokens", "41 tokens (89 %)", "differs at token 41", "'star.'", "'moon."):
        assert fact in shown
    assert main(["explain", "--url", server.url + "/v1", "--api-key", "alice", "--json"]) == 0
    assert second["id"] in capsys.readouterr().out
    assert main(["explain", "nothing", "--url", server.url, "--api-key", "alice"]) == 1
    assert capsys.readouterr().err.endswith("/nothing answered: this key made no such request, or it is too long ago\n")
    assert main(["explain", "--url", "http://127.0.0.1:1"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_keys_share_nothing(server: Served) -> None:
    """Not even a client's own salt finds another key's prefixes; it only narrows."""
    body = {"prompt": "a secret that is long enough to fill more than one block", "max_tokens": 1, "temperature": 0}

    def reused(key: str, **fields: object) -> int:
        return server.ask("/v1/completions", body | fields, key).json["kvarn"]["reused_tokens"]

    assert reused("alice") < 5
    known = reused("alice")
    assert known > 50
    assert reused("bob") == 0
    assert reused("alice", cache_salt="mine") == 0
    assert reused("alice", cache_salt="mine") == known
    assert reused("bob", cache_salt="mine") == 0


def test_the_map_of_the_cache(server: Served) -> None:
    found = server.cache("alice")
    assert (found["strategy"], found["codec"], found["blocks"]["all"]) == ("paged", "bf16", 512)
    with server.start(COMPLETION | {"max_tokens": 1900, "ignore_eos": True}, "bob"):
        live = server.cache("alice")
    assert live["sequences"] == 1
    (group,) = live["groups"]
    (sequence,) = group["sequences"]
    assert [block["first"] for block in sequence["blocks"]][:2] == [0, 32]
    assert live["blocks"]["used"] == len(sequence["blocks"])
    assert "abcd" not in str(live), "no text of a prompt"


def test_prefixes_can_be_shared_between_keys(tmp_path) -> None:
    flags = ("--api-key", "alice", "--api-key", "bob", "--share-prefixes", "--metrics-prefix", "vllm", "--alias", "t")
    with serve(tiny_model(tmp_path), *flags) as served:
        body = {"prompt": "something long that is asked by many", "max_tokens": 1}
        served.ask("/v1/completions", body, "alice")
        found = served.ask("/v1/completions", body, "bob").json["kvarn"]
        assert found["recomputed_tokens"] == 1
        body["prompt"] = body["prompt"].replace("many", "few")
        found = served.ask("/v1/completions", body, "bob").json["kvarn"]
        ended = found["reuse_ended"]
        assert (ended["reason"], "theirs" in ended) == ("differs", False), "shared, but not quoted"
        assert "many" not in str(found)
        assert served.metric("vllm:prefix_cache_queries_total", model_name="t") > 0
        assert served.metric("vllm:kv_cache_usage_perc") == 0
