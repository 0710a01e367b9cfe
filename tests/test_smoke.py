"""The backbone in seconds, and an introduction: one tiny model from file to text to HTTP (`make smoke`).

Each test is one sentence about the system. The weights are random: the text means nothing, and is always the same.
"""

import json
import math
from pathlib import Path

import pytest
from support.serving import serve, tiny_model

from kvarn import LLM, SamplingParams
from kvarn.cache.strategy import NAMES
from kvarn.engine.scoring import perplexity

pytestmark = pytest.mark.smoke

PROMPT = "The quick brown fox jumps over the lazy dog"
GREEDY = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file: three layers, and a token for every byte."""
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    """The model on the native backend with a paged cache, as `LLM(path)` gives it."""
    return LLM(model, cache="paged", context=128, threads=1)


def test_a_prompt_becomes_text(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, GREEDY)
    assert output.prompt_tokens == len(PROMPT), "a token for every byte"
    assert len(output.tokens) == 24
    assert output.text == "".join(llm.stream(PROMPT, GREEDY)), "streaming gives the same text in pieces"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("strategy", NAMES)
def test_every_cache_strategy_gives_the_same_tokens(llm: LLM, model: Path, strategy: str, backend: str) -> None:
    """A strategy is a choice of speed and memory. As long as the window holds the text, none changes a token."""
    other = LLM(model, cache=strategy, context=128, backend=backend, threads=1)
    assert other.generate(PROMPT, GREEDY)[0].tokens == llm.generate(PROMPT, GREEDY)[0].tokens


def test_a_batch_gives_each_prompt_what_it_gets_alone(llm: LLM) -> None:
    prompts = [PROMPT[:n] for n in (1, 9, 20, 33)]
    together = llm.generate(prompts, GREEDY)
    assert [output.tokens for output in together] == [llm.generate(p, GREEDY)[0].tokens for p in prompts]


def test_a_prefix_that_was_computed_is_reused(model: Path) -> None:
    llm = LLM(model, cache="paged", context=128, block_size=16, threads=1)
    first = llm.generate(PROMPT, GREEDY)
    again = llm.generate(PROMPT, GREEDY)
    assert again[0].tokens == first[0].tokens
    assert llm.cache.usage().prefix_hits == len(PROMPT) - 1, "all but the token that gives the first answer"


def test_perplexity_is_that_of_the_reference(llm: LLM, model: Path) -> None:
    """Random weights know nothing: every byte is about as likely as any other."""
    text = llm.tokenizer.encode(PROMPT * 4)
    slow = LLM(model, cache="contiguous", context=128, cache_type="f32", backend="reference", threads=1)
    fast = LLM(model, cache="contiguous", context=128, cache_type="f32", threads=1)
    scores = [perplexity(x.program, x.memory, x.cache, text, 64, 2, None, 64) for x in (slow, fast)]
    assert scores[0].tokens == 2 * 31
    assert math.isclose(scores[0].ppl, scores[1].ppl, rel_tol=1e-3)


def test_a_server_answers_a_streamed_chat_counts_it_and_goes_down(model: Path, llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    with serve(model, "--alias", "tiny", "-c", "128", "-np", "2", "-t", "1") as server:
        body = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0, "stream": True}
        reply = server.ask("/v1/chat/completions", body)
        assert reply.status == 200
        choices = [event["choices"][0] for event in reply.events if event["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        assert text == llm.chat(messages, max_tokens=12, temperature=0).text, "HTTP changes nothing"
        assert choices[-1]["finish_reason"] == "length"
        assert [entry["id"] for entry in server.ask("/v1/models").json["data"]] == ["tiny"]
        assert server.metric("kvarn:generation_tokens_total") == 12
        assert server.metric("kvarn:request_success_total") == 1
        assert json.loads(server.ask("/kvarn/cache").body)
        assert server.stop() == 0
