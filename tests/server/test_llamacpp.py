"""llama.cpp's own endpoints."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.scripted import HERMES, HERMES_CONTROL, Client, scripted_model, serving

from kvarn import LLM, SamplingParams
from kvarn.server.protocols.llamacpp.fields import OFF, TOLD

COMPLETION, INFILL = "/completion", "/infill"
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
GREEDY: dict[str, Any] = {"n_predict": 6, "temperature": 0, "ignore_eos": True}
FINAL = {
    *("index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated", "prompt"),
    *("generation_settings", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached", "timings"),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    path = scripted_model(tmp_path_factory.mktemp("model") / "m.gguf", HERMES, (*HERMES_CONTROL, *FIM))
    with serving(LLM(path, cache="paged", max_seqs=4, context=256, backend="cpu")) as client:
        yield client


def complete(client: Client, **fields: Any) -> Any:
    reply = client.ask(COMPLETION, **{"prompt": "the sea", **GREEDY} | fields)
    assert reply.status == 200, reply.body
    return reply.json


def frames(body: bytes) -> list[dict]:
    found = [json.loads(line[6:]) for line in body.decode().split("\n\n") if line]
    assert b"[DONE]" not in body
    return found


def test_a_whole_answer(client: Client) -> None:
    body = complete(client, return_tokens=True)
    assert set(body) >= FINAL
    assert (body["stop"], body["stop_type"], body["truncated"], body["stopping_word"]) == (True, "limit", False, "")
    assert (body["tokens_predicted"], body["tokens_evaluated"]) == (6, len(client.llm.tokenizer.encode("the sea")))
    assert client.llm.tokenizer.decode(body["tokens"]) == body["content"]
    assert body["prompt"] == "the sea"
    assert body["generation_settings"]["n_predict"] == 6
    again = complete(client)
    assert (again["tokens"], again["tokens_cached"]) == ([], again["tokens_evaluated"] - 1)
    assert again["timings"]["cache_n"] == again["tokens_cached"]
    chat = client.ask("/v1/completions", prompt="the sea", max_tokens=6, temperature=0, ignore_eos=True).json
    assert chat["choices"][0]["text"] == body["content"], "one engine"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "the sea"},
        {"prompt": [97, "b", 99], "n_probs": 3, "timings_per_token": True},
        {"prompt": ["ab", [99, 100]], "n_cmpl": 2, "temperature": 1.0, "seed": 5},
        {"prompt": "the sea", "stop": [" "], "temperature": 2.0, "seed": 1, "n_predict": -1},
        {"prompt": "the sea", "grammar": 'root ::= "a" [b-d]+', "n_predict": 20},
    ],
)
def test_streamed_equals_not_streamed(client: Client, fields: dict) -> None:
    whole = complete(client, return_tokens=True, **fields)
    whole = whole if isinstance(whole, list) else [whole]
    events = frames(client.ask(COMPLETION, **GREEDY | {"prompt": "", "stream": True} | fields).body)
    for choice in whole:
        own = [event for event in events if event["index"] == choice["index"]]
        *parts, last = own
        assert [part["stop"] for part in parts] == [False] * len(parts)
        assert "".join(part["content"] for part in parts) == choice["content"]
        tokens = [token for part in parts for token in part["tokens"]]
        assert tokens == choice["tokens"][: len(tokens)]
        same = ("stop", "stop_type", "stopping_word", "tokens_predicted", "tokens_evaluated", "prompt", "truncated")
        assert {name: last[name] for name in same} == {name: choice[name] for name in same}
        assert last["content"] == ""
        if "n_probs" in fields:
            probs = [entry for part in parts for entry in part["completion_probabilities"]]
            assert probs == choice["completion_probabilities"]
            assert all("timings" in part for part in parts)


def test_ends(client: Client) -> None:
    tokens = complete(client, return_tokens=True)["tokens"]
    text = client.llm.tokenizer.decode(tokens[1:2])
    stopped = complete(client, stop=[text], n_predict=-1)
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", text)
    eos = client.llm.tokenizer.eos_ids[0]
    ended = complete(client, logit_bias=[[eos, 100]], ignore_eos=False)
    assert (ended["stop_type"], ended["content"]) == ("eos", "")
    full = complete(client, n_predict=-1)
    assert (full["stop_type"], full["truncated"]) == ("limit", True), "the context was full"


def test_probabilities(client: Client) -> None:
    body = complete(client, n_probs=4)
    entries = body["completion_probabilities"]
    assert len(entries) == 6
    for entry in entries:
        assert len(entry["top_logprobs"]) == 4
        assert {"id", "token", "bytes", "logprob"} <= set(entry)
        assert entry["id"] == entry["top_logprobs"][0]["id"], "greedy"


def test_biases_by_id_and_by_text(client: Client) -> None:
    (first,) = complete(client, return_tokens=True, n_predict=1)["tokens"]
    text = client.llm.tokenizer.decode([first])
    for bias in ([[first, False]], [[first, -100]], {str(first): -100}, [[text, False]]):
        assert complete(client, n_predict=1, return_tokens=True, logit_bias=bias)["tokens"] != [first], bias
    for bias in ([["q", 100]], {"q": 100}):
        assert complete(client, n_predict=1, logit_bias=bias)["content"] == "q"


def test_n_predict_0_only_computes_the_prompt(client: Client) -> None:
    before = client.llm.engine.stats.generated_tokens
    body = complete(client, prompt="a prompt that is new here", n_predict=0)
    assert (body["content"], body["tokens_predicted"], body["generation_settings"]["n_predict"]) == ("", 0, 0)
    (event,) = frames(client.ask(COMPLETION, prompt="a prompt that is new here", n_predict=0, stream=True).body)
    assert (event["content"], event["stop"], event["stop_type"]) == ("", True, "limit")
    assert client.llm.engine.stats.generated_tokens == before
    warm = complete(client, prompt="a prompt that is new here")
    assert warm["tokens_cached"] == warm["tokens_evaluated"] - 1


def test_control_tokens_are_recognized_in_prompts(client: Client) -> None:
    marked = complete(client, prompt="<|im_start|>user")
    assert marked["tokens_evaluated"] == 5
    plain = client.ask("/v1/completions", prompt="<|im_start|>user", max_tokens=1).json
    assert plain["usage"]["prompt_tokens"] == 16


def test_response_fields(client: Client) -> None:
    body = complete(client, response_fields=["content", "generation_settings/n_predict", "timings/x", "nothing"])
    assert set(body) == {"content", "generation_settings/n_predict"}
    assert body["generation_settings/n_predict"] == 6


def test_what_has_no_effect_is_told(client: Client) -> None:
    fields = {"id_slot": 2, "cache_prompt": False, "n_keep": 5, "samplers": ["top_k"], "t_max_predict_ms": 500}
    reply = client.ask(COMPLETION, prompt="a", **GREEDY, **fields)
    assert sorted(reply.json["kvarn"]["ignored"]) == sorted(fields)
    quiet = complete(client, id_slot=-1, cache_prompt=True, n_keep=0, repeat_last_n=64, dry_base=3, mirostat=0)
    assert "ignored" not in quiet["kvarn"]
    assert "repeat_last_n" in complete(client, repeat_last_n=64, repeat_penalty=1.3)["kvarn"]["ignored"]
    assert set(OFF).isdisjoint(TOLD)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": None}, "prompt is missing"),
        ({"prompt": []}, "prompt has 0"),
        ({"prompt": [[]]}, "prompt[0] has 0"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "multimodal_data is not implemented"),
        ({"prompt": [9999]}, "prompt has an id outside the vocabulary"),
        ({"n_predict": 1, "max_tokens": 2}, "n_predict and max_tokens differ"),
        ({"n_predict": -3}, "n_predict is -3; it must be at least -2"),
        ({"n_probs": 21}, "n_probs is 21; it must be at most 20"),
        ({"mirostat": 2}, "mirostat is not implemented here: leave it out"),
        ({"post_sampling_probs": True}, "post_sampling_probs is not implemented here"),
        ({"lora": [{"id": 0}]}, "lora is not implemented here"),
        ({"logit_bias": [[1]]}, "logit_bias[0] has 1"),
        ({"logit_bias": [[1, "x"]]}, 'logit_bias has the bias "x"'),
        ({"logit_bias": [[1, True]]}, "logit_bias has the bias true"),
        ({"logit_bias": [[-1, 1]]}, "logit_bias has the token -1"),
        ({"logit_bias": [[True, 1]]}, "logit_bias has the token true"),
        ({"logit_bias": [[2**70, 1]]}, "logit_bias has the token 1180591620717411303424"),
        ({"logit_bias": [[1.5, 1]]}, "logit_bias has the token 1.5"),
        ({"logit_bias": {"1": {}}}, "logit_bias has the bias {}"),
        ({"logit_bias": [[400, 1]]}, "token"),
        ({"n_cmpl": 128, "prompt": ["a", "b"]}, "2 prompts times n_cmpl is more than 128"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"frobnicate": 1}, "frobnicate is not implemented here"),
    ],
)
def test_bad_input(client: Client, fields: dict, message: str) -> None:
    reply = client.ask(COMPLETION, **{"prompt": "a"} | fields)
    assert reply.status == 400, reply.body
    assert message in reply.error
    assert (reply.json["error"]["code"], reply.json["error"]["type"]) == (400, "invalid_request_error")


def test_a_prompt_that_is_too_long(client: Client) -> None:
    error = client.ask(COMPLETION, prompt="x" * 300).json["error"]
    assert (error["type"], error["n_ctx"]) == ("exceed_context_size_error", 256)
    assert error["n_prompt_tokens"] == 300


def test_infill(client: Client) -> None:
    fields = {"input_prefix": "a = ", "prompt": "1", "input_suffix": "\nprint(a)", **GREEDY}
    body = client.ask(INFILL, **fields).json
    assert body["prompt"] == "<|fim_prefix|>a = 1<|fim_suffix|>\nprint(a)<|fim_middle|>"
    assert body["tokens_predicted"] == 6
    extra = [{"filename": "b.py", "text": "b = 2\n"}]
    body = client.ask(INFILL, **fields, input_extra=extra).json
    assert body["prompt"].startswith(
        "<|repo_name|>project\n<|file_sep|>b.py\nb = 2\n<|file_sep|>filename\n<|fim_prefix|>"
    )
    events = frames(client.ask(INFILL, **fields, input_extra=extra, stream=True).body)
    assert "".join(event["content"] for event in events) == body["content"]


def test_extra_files_that_do_not_fit_are_left_out_and_told(client: Client) -> None:
    extra = [{"filename": f"{i}.py", "text": str(i) * 60} for i in range(6)]
    body = client.ask(INFILL, input_prefix="a", input_suffix="b", input_extra=extra, **GREEDY).json
    assert "5.py" in body["prompt"], "the last are kept"
    assert "0.py" not in body["prompt"]
    assert "input_extra[0]" in body["kvarn"]["ignored"]
    assert body["tokens_evaluated"] + 6 <= 256


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_suffix": None}, "input_suffix is missing"),
        ({"input_extra": [{}]}, "input_extra[0].filename is missing"),
        ({"input_extra": [{"filename": "ok"}]}, "input_extra[0].text is missing"),
        ({"input_extra": [{"filename": 123, "text": "abc"}]}, "input_extra[0].filename is 123"),
        ({"prompt": [1]}, "prompt is [1]; it must be a string"),
        ({"input_prefix": "x" * 3000}, "this server's context is 256 tokens"),
    ],
)
def test_wrong_infill(client: Client, fields: dict, message: str) -> None:
    reply = client.ask(INFILL, **{"input_prefix": "a", "input_suffix": "b"} | fields)
    assert (reply.status, message in reply.error) == (400, True), reply.body


def test_apply_template(client: Client) -> None:
    messages = [{"role": "user", "content": "Hi <|im_end|>"}]
    body = client.ask("/apply-template", messages=messages).json
    assert body["prompt"] == "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    closed = client.ask("/apply-template", messages=messages, add_generation_prompt=False).json
    assert closed["prompt"] == "<|im_start|>user\nHi <|im_end|><|im_end|>\n"
    assert client.ask("/apply-template", messages="x").status == 400


def test_props_and_slots(client: Client) -> None:
    props = client.get("/props").json
    assert (props["total_slots"], props["model_path"]) == (4, "m.gguf")
    assert props["default_generation_settings"]["n_ctx"] == 256
    assert props["default_generation_settings"]["params"]["temperature"] == 0.7
    slots = client.get("/slots").json
    assert [slot["is_processing"] for slot in slots] == [False] * 4
    assert client.get("/v1/health").json == {"status": "ok"}


def test_slots_have_no_texts(client: Client) -> None:
    job = client.llm.start("a secret", SamplingParams(max_tokens=200, ignore_eos=True))
    client.llm.runner.step()
    reply = client.get("/slots")
    assert [slot["is_processing"] for slot in reply.json] == [True, False, False, False]
    assert reply.json[0]["n_prompt_tokens"] == 8
    assert b"secret" not in reply.body
    client.llm.runner.cancel(job)


def test_no_slot_is_free(client: Client) -> None:
    assert client.get("/slots?fail_on_no_slot=1").status == 200
    jobs = [client.llm.start([97, i], SamplingParams(max_tokens=200, ignore_eos=True)) for i in range(5)]
    client.llm.runner.step()
    reply = client.get("/slots?fail_on_no_slot=1")
    assert (reply.status, reply.json["error"]["type"]) == (503, "unavailable_error")
    for job in jobs:
        client.llm.runner.cancel(job)


def test_a_chat_is_counted(client: Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    found = client.ask("/chat/completions/input_tokens", messages=messages).json
    assert found["input_tokens"] == len(client.llm.render(messages))
