"""What vLLM and llama.cpp add to OpenAI's completions: token ids, log-probabilities of prompts, a suffix, timings."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scripted import CHAT, HERMES, HERMES_CONTROL, TEXT, Client, scripted_model, serving
from support.serving import tiny_model

from kvarn import LLM
from kvarn.server.timings import Timings

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
ASK = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
HELLO = {"messages": [{"role": "user", "content": "Hello."}], **ASK}
TIMES = {"cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"} | {
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second")
}


def opened(path: Path) -> LLM:
    return LLM(path, cache="paged", max_seqs=4, context=256, backend="cpu")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with serving(opened(tiny_model(tmp_path_factory.mktemp("model")))) as client:
        yield client


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    path = scripted_model(tmp_path_factory.mktemp("model") / "m.gguf", HERMES, (*HERMES_CONTROL, *FIM))
    with serving(opened(path)) as client:
        yield client


def test_token_ids_of_completions(client: Client) -> None:
    fields = {"prompt": ["ab", "the sea"], "n": 2, "return_token_ids": True, **ASK}
    whole = client.ask(TEXT, **fields).json["choices"]
    for choice, text in zip(whole, ["ab", "ab", "the sea", "the sea"], strict=True):
        assert choice["prompt_token_ids"] == client.llm.tokenizer.encode(text)
        assert len(choice["token_ids"]) == 5
        assert client.llm.tokenizer.decode(choice["token_ids"]) == choice["text"]
    streamed: dict[int, dict] = {}
    for event in client.ask(TEXT, **fields, stream=True).events:
        for choice in event["choices"]:
            kept = streamed.setdefault(choice["index"], {"ids": [], "prompts": []})
            kept["ids"] += choice.get("token_ids", [])
            kept["prompts"] += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
    for choice in whole:
        kept = streamed[choice["index"]]
        assert (kept["ids"], kept["prompts"]) == (choice["token_ids"], [choice["prompt_token_ids"]])


def test_token_ids_of_chats(client: Client) -> None:
    whole = client.ask(CHAT, **HELLO, return_token_ids=True).json
    assert whole["prompt_token_ids"] == client.llm.render(HELLO["messages"])
    assert len(whole["choices"][0]["token_ids"]) == 5
    events = client.ask(CHAT, **HELLO, return_token_ids=True, stream=True).events
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [whole["prompt_token_ids"]]
    assert events[0]["prompt_token_ids"]
    choices = [choice for event in events for choice in event["choices"]]
    assert [id for choice in choices for id in choice.get("token_ids", [])] == whole["choices"][0]["token_ids"]
    plain = client.ask(CHAT, **HELLO).json
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


def test_prompt_logprobs_are_those_of_echo(client: Client) -> None:
    echoed = client.ask(TEXT, prompt="the sea", echo=True, logprobs=2, **ASK).json["choices"][0]["logprobs"]
    choice = client.ask(TEXT, prompt="the sea", prompt_logprobs=2, **ASK).json["choices"][0]
    assert choice["logprobs"] is None
    assert not choice["text"].startswith("the sea")
    tokens = client.llm.tokenizer.encode("the sea")
    assert choice["prompt_logprobs"][0] is None
    for at in range(1, len(tokens)):
        entry = choice["prompt_logprobs"][at]
        assert entry[str(tokens[at])]["logprob"] == echoed["token_logprobs"][at]
        ranks = sorted(found["rank"] for found in entry.values() if found["rank"] is not None)
        assert ranks == [1, 2]
        best = min(entry.values(), key=lambda found: found["rank"] or 99)
        assert best["logprob"] == max(found["logprob"] for found in entry.values())
        assert entry[str(tokens[at])]["decoded_token"] == chr(tokens[at]) or tokens[at] > 255


def test_prompt_logprobs_of_chats(client: Client) -> None:
    body = client.ask(CHAT, **HELLO, prompt_logprobs=0).json
    tokens = client.llm.render(HELLO["messages"])
    assert [None, *map(str, tokens[1:])] == [each and next(iter(each)) for each in body["prompt_logprobs"]]
    assert body["kvarn"]["reused_tokens"] == 0


def test_timings(client: Client) -> None:
    for path, fields in ((CHAT, HELLO), (TEXT, {"prompt": "the sea", **ASK})):
        body = client.ask(path, **fields).json
        assert set(body["timings"]) == TIMES
        assert body["timings"]["predicted_n"] == 5
        assert body["timings"]["prompt_n"] + body["timings"]["cache_n"] == body["usage"]["prompt_tokens"]
        events = client.ask(path, **fields, stream=True).events
        assert [set(event.get("timings", ())) for event in events] == [*([set()] * (len(events) - 1)), TIMES]
        each = client.ask(path, **fields, stream=True, timings_per_token=True).events
        n_untimed = int(path == CHAT)  # the opening
        assert [set(event.get("timings", ())) for event in each[:n_untimed]] == [set()] * n_untimed
        counts = [event["timings"]["predicted_n"] for event in each[n_untimed:]]
        assert counts == sorted(counts)
        assert counts[-1] == 5


def test_rates_are_those_of_the_tokens_after_the_first() -> None:
    found = Timings(cached=3, computed=10, prompt_ms=20.0, n=5, ms=8.0).as_json()
    assert (found["prompt_per_token_ms"], found["prompt_per_second"]) == (2.0, 500.0)
    assert (found["predicted_per_token_ms"], found["predicted_per_second"]) == (2.0, 500.0)
    assert Timings(1, 0, 0.0, 1, 0.0).as_json()["predicted_per_second"] == 0.0


def test_verbose_shows_the_prompt(client: Client) -> None:
    body = client.ask(CHAT, **HELLO, verbose=True).json
    assert body["__verbose"]["prompt"] == client.llm.tokenizer.decode(
        client.llm.render(HELLO["messages"]), special=True
    )
    assert "__verbose" not in client.ask(CHAT, **HELLO, verbose=False).json


def test_slots_of_llama_cpp_have_no_effect_and_are_told(client: Client) -> None:
    body = client.ask(CHAT, **HELLO, id_slot=0, cache_prompt=False, n_keep=3).json
    assert body["kvarn"]["ignored"] == ["id_slot", "cache_prompt", "n_keep"]


def test_a_suffix_makes_a_gap(coder: Client) -> None:
    body = coder.ask(TEXT, prompt="a = ", suffix="\nprint(a)", return_token_ids=True, **ASK).json
    text = "<|fim_prefix|>a = <|fim_suffix|>\nprint(a)<|fim_middle|>"
    assert coder.llm.tokenizer.decode(body["choices"][0]["prompt_token_ids"], special=True) == text
    streamed = coder.ask(TEXT, prompt="a = ", suffix="\nprint(a)", stream=True, **ASK).events
    assert "".join(c["text"] for event in streamed for c in event["choices"]) == body["choices"][0]["text"]
    pad = coder.llm.tokenizer.markers.pad
    reply = coder.ask(TEXT, prompt="a", suffix="b", logit_bias={str(pad): 100}, temperature=0, max_tokens=9).json
    assert reply["choices"][0]["finish_reason"] == "stop", "another part of a file begins"


def test_what_a_suffix_needs(client: Client, coder: Client) -> None:
    for who, fields, message in (
        (client, {"prompt": "a", "suffix": "b"}, "suffix: the model has no tokens that mark a gap"),
        (coder, {"prompt": [97], "suffix": "b"}, "suffix needs a prompt that is a text"),
        (coder, {"prompt": "a", "suffix": "b" * 3000}, "this server's context is 256 tokens"),
    ):
        reply = who.ask(TEXT, **fields)
        assert (reply.status, message in reply.error) == (400, True), reply.body
    assert client.ask(TEXT, prompt="a", suffix="", **ASK).status == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs are not part of a stream"),
        ({"prompt_logprobs": 1, "echo": True, "logprobs": 1}, "echo with logprobs reports the prompt"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21; it must be at most 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1; it must be at least 0"),
        ({"return_token_ids": 1}, "return_token_ids is 1; it must be a boolean"),
    ],
)
def test_wrong_extensions(client: Client, fields: dict, message: str) -> None:
    reply = client.ask(TEXT, prompt="a", **fields)
    assert (reply.status, message in reply.error) == (400, True), reply.body


def test_render_gives_the_prompt_and_computes_nothing(client: Client) -> None:
    before = client.llm.engine.stats.steps
    chat = client.ask(f"{CHAT}/render", **HELLO).json
    assert chat["token_ids"] == client.llm.render(HELLO["messages"])
    assert chat["prompt"] == client.llm.tokenizer.decode(chat["token_ids"], special=True)
    assert (chat["sampling_params"]["max_tokens"], chat["model"]) == (5, "tiny")
    texts = client.ask(f"{TEXT}/render", prompt=["ab", "the sea"]).json
    assert [each["token_ids"] for each in texts] == [client.llm.tokenizer.encode(t) for t in ("ab", "the sea")]
    assert client.llm.engine.stats.steps == before
    assert client.ask(f"{CHAT}/render", messages=3).status == 400


def test_tokenize_as_llama_cpp_does(coder: Client) -> None:
    text = "é<|im_end|>"
    found = coder.ask("/tokenize", content=text, with_pieces=True).json["tokens"]
    assert [each["piece"] for each in found] == [[0xC3], [0xA9], "<|im_end|>"]
    assert len(coder.ask("/tokenize", content=text, parse_special=False).json["tokens"]) == 12
    assert coder.ask("/detokenize", tokens=[each["id"] for each in found]).json["content"] == text
    for fields, message in (
        ({"prompt": "a", "with_pieces": True}, "with_pieces belongs to content"),
        ({"content": "a", "add_special_tokens": True}, "give add_special"),
        ({"content": "a", "prompt": "a"}, "give prompt or content"),
    ):
        reply = coder.ask("/tokenize", **fields)
        assert (reply.status, message in reply.error) == (400, True), reply.body


RESPONSES, LLAMA = "/v1/responses", "/completion"


@pytest.mark.parametrize("path", [CHAT, TEXT, LLAMA, RESPONSES])
def test_a_stream_tells_the_progress_of_its_prompt(tmp_path: Path, path: str) -> None:
    text = "This is a test. " * 10
    fields = {
        CHAT: {"messages": [{"role": "user", "content": text}], **ASK},
        TEXT: {"prompt": text, **ASK},
        LLAMA: {"prompt": text, "n_predict": 5, "temperature": 0, "ignore_eos": True},
        RESPONSES: {"input": text, "max_output_tokens": 5, "temperature": 0},
    }[path]
    llm = LLM(tiny_model(tmp_path), cache="paged", max_seqs=4, context=256, backend="cpu", max_batch_tokens=64)
    with serving(llm) as client:

        def events(**more: object) -> list[dict]:
            body = client.ask(path, **fields, stream=True, **more).body.decode()
            lines = [line[6:] for line in body.split("\n") if line.startswith("data: ")]
            return [json.loads(line) for line in lines if line != "[DONE]"]

        for n_cached_least in (0, 64):
            found = events(return_progress=True, timings_per_token=True)
            told = [event["prompt_progress"] for event in found if "prompt_progress" in event]
            total, cached = told[0]["total"], told[0]["cache"]
            assert {(each["total"], each["cache"]) for each in told} == {(total, cached)}
            assert cached >= n_cached_least
            assert [each["processed"] for each in told] == [*range(cached, total, 64), total]
            times = [event["timings"] for event in found if "prompt_progress" in event]
            assert [each["prompt_n"] for each in times] == [each["processed"] - cached for each in told]
            assert (times[0]["prompt_ms"], times[0]["predicted_n"]) == (0.0, 0)
            assert times[-1]["prompt_ms"] > 0
            first_text = next(
                i for i, event in enumerate(found) if "timings" in event and "prompt_progress" not in event
            )
            assert not any("prompt_progress" in event for event in found[first_text:])
            if path == RESPONSES:
                assert {e["type"] for e in found if "prompt_progress" in e} == {"response.in_progress"}
                assert [e["sequence_number"] for e in found] == list(range(len(found)))
                assert all("timings" in e for e in found if e["type"].endswith("output_text.delta"))
                assert "timings" in found[-1]
        assert not any("prompt_progress" in event for event in events())
        whole = client.ask(path, **fields, return_progress=True)
        assert whole.status == 200
        assert "prompt_progress" not in whole.json
        assert "ignored" not in whole.json["kvarn"]
