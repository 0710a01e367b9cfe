"""Bad input: one clear line each, the right status, OpenAI's shape, and nothing left behind."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from support.serving import Served, serve, tiny_model

from kvarn.server import request_fields
from kvarn.server.protocols.responses import fields as responses
from kvarn.server.schema import show

CHAT, TEXT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
TALK = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tiny_model(tmp_path_factory.mktemp("model"), 256), "--alias", "tiny", "--strict-model") as served:
        yield served
        served.until_idle()
        assert served.cache()["sequences"] == 0
        assert served.ask("/health").status == 200


def text(**fields: object) -> dict:
    return {"prompt": "hello", "max_tokens": 2} | fields


def chat(**fields: object) -> dict:
    return {"messages": TALK, "max_tokens": 2} | fields


def said(role: object = "user", content: object = "hi", **fields: object) -> dict:
    return chat(messages=[{"role": role, "content": content} | fields])


TABLE: dict[str, tuple[str, object, int, str]] = {
    # the body itself
    "empty": (TEXT, b"", 400, "the body is not JSON: Expecting value at character 0"),
    "no JSON": (TEXT, b"{prompt: 1}", 400, "the body is not JSON"),
    "half JSON": (TEXT, b'{"prompt": "a"', 400, "the body is not JSON"),
    "bad UTF-8": (TEXT, b'{"prompt": "\xff\xfe"}', 400, "the body is not UTF-8 (byte 12)"),
    "UTF-16": (TEXT, '{"prompt": "a"}'.encode("utf-16"), 400, "the body is not UTF-8 (byte 0)"),
    "half a surrogate pair": (TEXT, rb'{"prompt": "\ud800"}', 400, "half of a surrogate pair"),
    "an array": (TEXT, b"[1]", 400, "the body is [1]; it must be an object"),
    "NaN": (TEXT, b'{"prompt": "a", "temperature": NaN}', 400, "NaN is not a JSON number"),
    "infinity": (TEXT, b'{"prompt": "a", "temperature": 1e999}', 400, "temperature is inf; it must be a number"),
    "deep": (
        TEXT,
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        400,
        "the body is not JSON that can be read",
    ),
    "endless number": (TEXT, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, "the body is not JSON that can"),
    "10 MB": (TEXT, json.dumps({"prompt": "a" * 10_000_000}).encode(), 413, "the body has more than 8388608 bytes"),
    "a prompt of 7 MB": (TEXT, text(prompt="a" * 7_000_000), 400, "and this server's context is 256 tokens"),
    # prompts
    "no prompt": (TEXT, {"max_tokens": 2}, 400, "prompt is missing"),
    "null prompt": (TEXT, text(prompt=None), 400, "prompt is missing"),
    "empty prompt": (TEXT, text(prompt=""), 400, "the prompt is empty"),
    "no ids": (TEXT, text(prompt=[]), 400, "prompt has 0; it must have at least 1 item"),
    "prompt of a wrong type": (TEXT, text(prompt={"a": 1}), 400, "prompt is {'a': 1}; it must be a string or an array"),
    "mixed prompt": (TEXT, text(prompt=["a", 1]), 400, "prompt mixes texts and tokens"),
    "negative id": (TEXT, text(prompt=[-1]), 400, "prompt[0]"),
    "huge id": (TEXT, text(prompt=[10**30]), 400, "prompt[0]"),
    "id outside the vocabulary": (TEXT, text(prompt=[300]), 400, "prompt has an id outside the vocabulary of 259"),
    "too long": (TEXT, text(prompt="x" * 300), 400, "the prompt has 300 tokens and this server's context is 256"),
    "too long an answer": (
        TEXT,
        text(max_tokens=9999),
        400,
        "together more than this server's context of 256 tokens; lower max_tokens to 251",
    ),
    "too many prompts": (TEXT, text(prompt=["a"] * 70, n=2), 400, "70 prompts times n is more than 128"),
    # messages
    "no messages": (CHAT, {"max_tokens": 2}, 400, "messages is missing"),
    "messages of a wrong type": (CHAT, chat(messages="hi"), 400, 'messages is "hi"; it must be an array'),
    "empty messages": (CHAT, chat(messages=[]), 400, "messages has 0; it must have at least 1 item"),
    "message without role": (CHAT, chat(messages=[{"content": "x"}]), 400, "messages[0].role is missing"),
    "message without content": (CHAT, chat(messages=[{"role": "user"}]), 400, "messages[0].content is missing"),
    "a robot's message": (CHAT, said("robot"), 400, 'messages[0].role is "robot"; it must be one of "system"'),
    "an image": (CHAT, said(content=[{"type": "image_url"}]), 400, 'content[0].type is "image_url"; it must be'),
    "an unknown key": (CHAT, said(weight=1), 400, "messages[0].weight is not implemented: leave it out"),
    "prompt in a chat": (CHAT, chat(prompt="a"), 400, "prompt is not implemented here: leave it out"),
    # numbers
    "negative max_tokens": (TEXT, text(max_tokens=-2), 400, "max_tokens is -2; it must be at least 1"),
    "max_tokens 0": (TEXT, text(max_tokens=0), 400, "max_tokens is 0; it must be at least 1"),
    "huge max_tokens": (TEXT, text(max_tokens=10**40), 400, "max_tokens is 1000000000000"),
    "max_tokens of a wrong type": (TEXT, text(max_tokens="5"), 400, 'max_tokens is "5"; it must be an integer'),
    "max_tokens with a fraction": (TEXT, text(max_tokens=1.5), 400, "max_tokens is 1.5; it must be an integer"),
    "true is no number": (TEXT, text(max_tokens=True), 400, "max_tokens is true; it must be an integer"),
    "two limits": (CHAT, chat(max_completion_tokens=9), 400, "max_tokens and max_completion_tokens differ"),
    "negative temperature": (TEXT, text(temperature=-0.1), 400, "temperature is -0.1; it must be at least 0"),
    "huge temperature": (TEXT, text(temperature=1e300), 400, "temperature is 1e+300; it must be at most 100"),
    "top_p 0": (TEXT, text(top_p=0), 400, "top_p is 0; it must be above 0"),
    "top_k -2": (TEXT, text(top_k=-2), 400, "top_k is -2; it must be at least -1"),
    "penalty": (TEXT, text(presence_penalty=3), 400, "presence_penalty is 3; it must be at most 2"),
    "huge seed": (TEXT, text(seed=2**70), 400, "seed is "),
    "n 0": (TEXT, text(n=0), 400, "n is 0; it must be at least 1"),
    "n 1000": (TEXT, text(n=1000), 400, "n is 1000; it must be at most 128"),
    "logprobs": (TEXT, text(logprobs=100), 400, "logprobs is 100; it must be at most 20"),
    "top_logprobs alone": (CHAT, chat(top_logprobs=3), 400, "top_logprobs needs logprobs: true"),
    # others
    "stop of a wrong type": (TEXT, text(stop=[1]), 400, "stop[0] is 1; it must be a string"),
    "logit_bias of a wrong type": (TEXT, text(logit_bias=[1]), 400, "logit_bias is [1]; it must be an object"),
    "logit_bias by name": (TEXT, text(logit_bias={"cat": 1}), 400, 'logit_bias has the key "cat"; keys are token ids'),
    "logit_bias outside": (TEXT, text(logit_bias={"999": 1}), 400, "logit_bias names a token outside the vocabulary"),
    "logit_bias too large": (TEXT, text(logit_bias={"9": 1000}), 400, "logit_bias.9 is 1000; it must be at most 100"),
    "stream of a wrong type": (TEXT, text(stream="yes"), 400, 'stream is "yes"; it must be a boolean'),
    "stream_options alone": (TEXT, text(stream_options={"include_usage": True}), 400, "stream_options needs stream"),
    "empty salt": (TEXT, text(cache_salt=""), 400, "cache_salt has 0; it must have at least 1 character"),
    "unknown model": (TEXT, text(model="gpt-9"), 404, "this server has the model tiny, no other"),
    "request_id": (TEXT, text(request_id="a\nb"), 400, "request_id has characters that a header cannot carry"),
    # what is not implemented
    "tools of a text": (TEXT, text(tools=[{"type": "function"}]), 400, "tools is not implemented here: leave it out"),
    "functions": (CHAT, chat(functions=[{"name": "f"}]), 400, "functions is not implemented here: leave it out"),
    "best_of": (TEXT, text(best_of=2), 400, "best_of is not implemented here"),
    "echo of a chat": (CHAT, chat(echo=True), 400, "echo is not implemented here"),
    "suffix": (TEXT, text(suffix="end"), 400, "suffix: the model has no tokens that mark a gap"),
    "an invention": (TEXT, text(frobnicate=0), 400, "frobnicate is not implemented here: leave it out"),
    "a long invention": (TEXT, text(**{"x" * 9000: 0}), 400, "is not implemented here: leave it out"),
    # elsewhere
    "tokenize nothing": (TOKENIZE, {}, 400, "give prompt or content (a text) or messages"),
    "tokenize 7 MB": (TOKENIZE, {"prompt": "a" * 7_000_000}, 400, "and this server's context is 256 tokens"),
    "tokenize a number": (TOKENIZE, {"prompt": 5}, 400, "prompt is 5; it must be a string"),
    "detokenize a text": (DETOKENIZE, {"tokens": "abc"}, 400, 'tokens is "abc"; it must be an array'),
    "detokenize outside": (DETOKENIZE, {"tokens": [259]}, 400, "tokens has an id outside the vocabulary of 259"),
}


@pytest.mark.parametrize(("path", "body", "status", "message"), TABLE.values(), ids=TABLE)
def test_bad_input(server: Served, path: str, body: object, status: int, message: str) -> None:
    reply = server.ask(path, body)
    assert (reply.status, message in reply.error) == (status, True), reply
    error = reply.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] in ("invalid_request_error", "not_found_error")
    assert "\n" not in reply.error
    assert len(reply.error) < 300


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"stop": None, "seed": None, "logit_bias": None, "n": None, "tools": None, "nonsense": None},
        {"max_completion_tokens": 2, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "logit_bias": {}},
        {"seed": -5, "n": 1.0},
        {"skip_special_tokens": True, "add_generation_prompt": True, "min_tokens": 0, "use_beam_search": False},
        {"length_penalty": 1.0, "priority": 0, "cache_prompt": True, "chat_template_kwargs": {}},
        {"messages": [*TALK, {"role": "assistant", "content": "x", "tool_calls": [], "annotations": []}, *TALK]},
        {"messages": [*TALK, {"role": "assistant", "content": "x", "refusal": None, "audio": None}, *TALK]},
        {"messages": [*TALK, {"role": "assistant", "content": "x", "reasoning_content": None}, *TALK]},
        {"stop": "", "max_tokens": -1},
        {"stop": [], "seed": -1},
        {"stop": [""], "stream_options": {}},
        {"spaces_between_special_tokens": True, "include_stop_str_in_output": False, "return_token_ids": False},
        {"truncate_prompt_tokens": None, "prompt_logprobs": None, "guided_json": None, "structured_outputs": None},
        {"repeat_penalty": 1.0, "typical_p": 1, "mirostat": 0, "n_probs": 0, "id_slot": -1, "grammar": ""},
        {"request_id": "mine", "bad_words": [], "length_penalty": 1, "stream_options": {"include_usage": None}},
    ],
)
def test_unsupported_fields_with_neutral_values_are_accepted(server: Served, fields: dict) -> None:
    reply = server.ask(CHAT, chat(**fields))
    assert reply.status == 200, reply


def test_a_prompt_that_is_too_long_has_an_error_code(server: Served) -> None:
    for body in (text(prompt="x" * 300), text(prompt="a" * 7_000_000), text(max_tokens=10_000)):
        assert server.ask(TEXT, body).json["error"]["code"] == "context_length_exceeded"


def test_unknown_addresses_and_methods_are_refused(server: Served) -> None:
    assert server.ask("/v1/nothing").status == 404
    assert server.ask("/v1/nothing").error == "GET /v1/nothing: there is nothing here; GET / lists the endpoints"
    reply = server.ask(TEXT)
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert server.ask("/kvarn/requests/cmpl-0").status == 404
    assert server.ask("/kvarn/requests/%ff%00").status == 404
    assert server.ask("/v1/models/%2e%2e%2f").status == 404


def test_a_client_that_leaves_during_its_body_is_harmless(server: Served) -> None:
    connection = server.connection()
    connection.putrequest("POST", TEXT)
    connection.putheader("Content-Length", "1000")
    connection.endheaders()
    connection.send(b'{"prompt": ')
    connection.close()
    assert server.ask(TEXT, text()).status == 200


def test_every_field_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    tables = request_fields.CHAT | request_fields.COMPLETION | responses.TABLE
    for name in tables.keys() - {"messages", "prompt", "model"}:
        assert re.search(rf"`{name}[`.]", text), f"{name} is not in docs/serving.md"


def test_a_long_value_is_cut_before_its_characters_are_looked_at() -> None:
    n_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal n_calls
        n_calls += event == "c_call"

    sys.setprofile(count)
    try:
        shown = show("\x07" * 100_000)
    finally:
        sys.setprofile(None)
    assert shown == '"' + 59 * "\ufffd" + " ... " + 11 * "\ufffd" + '"'
    assert n_calls < 200
