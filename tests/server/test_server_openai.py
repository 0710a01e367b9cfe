"""The `openai` package against a server process: every endpoint, streamed and not.

On the default model the text is that of `kvarn run`; on a tiny one the rest of the protocol is driven.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from support.models import model as model_file
from support.serving import Served, serve, tiny_model

from kvarn.cli import main

FOX = "The quick brown fox"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def client_of(server: Served, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    model = tiny_model(tmp_path_factory.mktemp("model"))
    with serve(model, "--alias", "tiny", "--api-key", "k") as server, client_of(server, "k") as client:
        yield client


@pytest.fixture(scope="module")
def smollm2() -> Iterator[openai.OpenAI]:
    path: Path = model_file("smollm2")
    with serve(path, "--alias", "smollm2", "-c", "256", "-np", "2") as server, client_of(server) as client:
        yield client


def run_json(capsys: pytest.CaptureFixture, *flags: str) -> dict:
    assert main(["run", "-m", str(model_file("smollm2")), "-c", "256", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_golden_text_equals_kvarn_run(smollm2: openai.OpenAI, capsys: pytest.CaptureFixture) -> None:
    expected = run_json(capsys, "-p", FOX, "-n", "8")
    assert expected["text"].startswith(" with a quick brown bear.")
    whole = smollm2.completions.create(model="smollm2", prompt=FOX, max_tokens=8, temperature=0)
    assert whole.choices[0].text == expected["text"]
    assert whole.usage.completion_tokens == 8
    stream = smollm2.completions.create(model="smollm2", prompt=FOX, max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected["text"]
    seeded = run_json(capsys, "-p", FOX, "-n", "8", "--temp", "0.9", "--seed", "5", "--top-p", "0.9")
    again = smollm2.completions.create(
        model="smollm2", prompt=FOX, max_tokens=8, temperature=0.9, seed=5, top_p=0.9, logprobs=2
    )
    assert again.choices[0].text == seeded["text"]
    assert len(again.choices[0].logprobs.tokens) == 8


def test_golden_chat_equals_kvarn_run(smollm2: openai.OpenAI, capsys: pytest.CaptureFixture) -> None:
    expected = run_json(capsys, "-p", FRANCE[0]["content"], "--chat", "-n", "20", "--temp", "0")
    whole = smollm2.chat.completions.create(model="smollm2", messages=FRANCE, max_tokens=20, temperature=0)
    assert whole.choices[0].message.content == expected["text"]
    assert whole.choices[0].finish_reason == expected["finish_reason"]
    stream = smollm2.chat.completions.create(
        model="smollm2",
        messages=FRANCE,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected["text"]
    usage = chunks[-1].usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1, "the same question a second time"
    assert chunks[-1].kvarn["reuse_ended"]["reason"] == "nothing left to reuse"


def test_models(tiny: openai.OpenAI) -> None:
    assert [model.id for model in tiny.models.list()] == ["tiny"]
    assert tiny.models.retrieve("tiny").owned_by == "kvarn"
    with pytest.raises(openai.NotFoundError, match="this server has the model tiny"):
        tiny.models.retrieve("gpt-9")


def test_chat_with_everything(tiny: openai.OpenAI) -> None:
    settings = dict(
        model="tiny",
        messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello."}],
        max_completion_tokens=7,
        n=2,
        seed=3,
        temperature=0.9,
        top_p=0.9,
        stop=["never", "ever"],
        logprobs=True,
        top_logprobs=3,
        logit_bias={"97": 1},
        presence_penalty=0.1,
        frequency_penalty=0.1,
        user="me",
        extra_body={"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1, "cache_priority": 1},
    )
    whole = tiny.chat.completions.create(**settings)
    assert [choice.index for choice in whole.choices] == [0, 1]
    for choice in whole.choices:
        assert len(choice.logprobs.content) == 7
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    chunks = list(tiny.chat.completions.create(**settings, stream=True))
    for choice in whole.choices:
        pieces = [c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(pieces) == choice.message.content


def test_completions_with_token_ids(tiny: openai.OpenAI) -> None:
    whole = tiny.completions.create(model="tiny", prompt=[[1, 2, 3], [4, 5]], max_tokens=3, n=2, temperature=0)
    assert len(whole.choices) == 4
    stream = tiny.completions.create(
        model="tiny", prompt=[[1, 2, 3], [4, 5]], max_tokens=3, n=2, temperature=0, stream=True
    )
    texts = ["", "", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_errors_are_the_packages_own(tiny: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match="temperature is -1; it must be at least 0") as caught:
        tiny.chat.completions.create(model="tiny", messages=messages, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].function.name is 'f g'"):
        tiny.chat.completions.create(
            model="tiny", messages=messages, tools=[{"type": "function", "function": {"name": "f g"}}]
        )
    with pytest.raises(openai.NotFoundError):
        tiny.models.retrieve("other")
    with pytest.raises(openai.AuthenticationError):
        tiny.with_options(api_key="wrong").models.list()


def test_closing_a_stream_frees_its_blocks(tiny: openai.OpenAI) -> None:
    with tiny.completions.create(
        model="tiny", prompt="x", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    for _ in range(500):
        if not tiny.get("../kvarn/cache", cast_to=dict)["sequences"]:
            break
    assert tiny.get("../kvarn/cache", cast_to=dict)["blocks"]["used"] == 0


def test_echo_gives_the_prompt_and_its_logprobs(tiny: openai.OpenAI) -> None:
    """As lm-eval asks for the likelihood of a text: the logprobs of a text's tokens do not depend on where the prompt
    ends."""
    text = "ab of the night, cd and a fox"
    whole = tiny.completions.create(model="tiny", prompt=text, echo=True, logprobs=2, max_tokens=1, temperature=0)
    choice = whole.choices[0]
    assert choice.text.startswith(text)
    found = choice.logprobs
    assert "".join(found.tokens[: whole.usage.prompt_tokens]) == text
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == whole.usage.total_tokens
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    assert all(1 <= len(top) <= 2 for top in found.top_logprobs[1:]), "bytes that are no text look alike"
    ids = tiny.post("/../tokenize", body={"prompt": text}, cast_to=object)["tokens"]
    for n in (1, 9, len(ids) - 1):
        part = tiny.completions.create(model="tiny", prompt=ids[:n], echo=True, logprobs=2, max_tokens=1)
        assert part.choices[0].logprobs.token_logprobs[:n] == found.token_logprobs[:n]
    chunks = tiny.completions.create(
        model="tiny", prompt=[text, "x"], echo=True, logprobs=2, max_tokens=3, temperature=0, stream=True, n=2
    )
    texts, logprobs = [""] * 4, [[] for _ in range(4)]
    for chunk in chunks:
        for each in chunk.choices:
            texts[each.index] += each.text
            logprobs[each.index] += each.logprobs.token_logprobs
    assert [each.startswith(text) for each in texts] == [True, True, False, False]
    assert logprobs[0][: len(ids)] == logprobs[1][: len(ids)] == found.token_logprobs[: len(ids)]
    plain = tiny.completions.create(model="tiny", prompt=text, echo=True, max_tokens=1, temperature=0)
    assert (plain.choices[0].text, plain.choices[0].logprobs) == (choice.text, None)
