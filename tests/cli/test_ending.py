"""The line after an answer: why it ended, with the limit that binds."""

from pathlib import Path

import pytest
from support.serving import tiny_model

from kvarn import LLM, SamplingParams
from kvarn.cli import main
from kvarn.cli.ending import ending, summary
from kvarn.llm import Job


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 256)


def answered(llm: LLM, prompt: list[int] | str, **settings) -> Job:
    job = llm.start(prompt, SamplingParams(**({"max_tokens": 1 << 30, "ignore_eos": True} | settings)))
    llm.runner.wait(job)
    return job


@pytest.mark.parametrize(
    ("setup", "text"),
    [
        ({"context": 64}, "context full (-c 64)"),
        ({"context": 0}, "the model's 256 tokens are full"),
        ({"context": 64, "cache": "ring"}, "the model's 256 tokens are full"),
        ({"context": 64, "cache": "sinks"}, "the model's 256 tokens are full"),
        (
            {"context": 128, "cache": "paged", "block_size": 16, "cache_bytes": None},
            "cache full (48 tokens, --cache-bytes)",
        ),
    ],
)
def test_the_limit_that_binds_is_named(tiny: Path, setup: dict, text: str) -> None:
    if "cache_bytes" in setup:
        with LLM(tiny, max_seqs=1, **setup) as whole:
            plan = whole.cache.plan
            setup = setup | {"cache_bytes": 3 * plan.nbytes // plan.groups[0].config.n_blocks}
    with LLM(tiny, max_seqs=1, **setup) as llm:
        assert ending(llm, answered(llm, "ab")) == text


def test_why_an_answer_ended(tiny: Path) -> None:
    with LLM(tiny, context=128, max_seqs=1, max_batch_tokens=16) as llm:
        few = answered(llm, "ab", max_tokens=3)
        assert ending(llm, few) == "stopped by -n 3"
        tokens, words = few.output().tokens, few.output().text
        assert ending(llm, answered(llm, "ab", stop_token_ids=tokens[-1:])) == "stop token"
        assert ending(llm, answered(llm, "ab", stop=words[-1:])) == "stop text"
        eos = llm.tokenizer.eos_ids[0]
        assert ending(llm, answered(llm, "ab", ignore_eos=False, logit_bias={eos: 100.0})) == "end of text"
        job = llm.start([1] * 50, SamplingParams(max_tokens=1))
        llm.runner.step()
        llm.runner.cancel(job)
        assert ending(llm, job) == "stopped while reading the prompt (16 of 50)"
        assert summary(job) == "50 + 0 tokens, 0 reused"


def test_the_summary_of_run(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["run", str(tiny), "ab", "-n", "1", "--ignore-eos"]) == 0
    line = capsys.readouterr().err
    assert line.endswith(" + 1 tokens, 0 reused; stopped by -n 1]\n")
    assert line.startswith("[")
