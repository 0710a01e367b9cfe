"""Sampling on the device through the engine: the tokens of host sampling, in any batch, and what is waited for."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gpu.support.models import Loaded, text, write
from support.tiny_models import GOLDEN

from kvarn.backends.cuda import program
from kvarn.backends.cuda.program import CudaLogits
from kvarn.engine.engine import Engine
from kvarn.engine.explain import explain
from kvarn.engine.params import SamplingParams
from kvarn.engine.request import Request

ONE = replace(GOLDEN, n_layers=1, window=10)
PLAIN = SamplingParams(max_tokens=4, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.9, top_p=0.9, seed=5, n=2)
ASKED = [
    (text(3), PLAIN),
    (text(9, 1), DRAWN),
    (text(5, 2), replace(DRAWN, n=1, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={7: 3.0})),
    (text(4, 3), replace(PLAIN, logprobs=2)),
    (text(6, 4), replace(DRAWN, n=1, top_k=4, min_p=0.05, prompt_logprobs=1)),
    (text(2, 5), replace(PLAIN, logits_processors=[lambda output, scores: scores])),
]


class Even:
    """A constraint: only even tokens."""

    def mask(self, scores: np.ndarray, output: Sequence[int]) -> None:
        assert all(token % 2 == 0 for token in output)
        scores[1::2] = -np.inf

    def complete(self, output: Sequence[int]) -> bool:
        return False


def answer(engine: Engine) -> dict[tuple[int, int], list[tuple]]:
    found: dict[tuple[int, int], list[tuple]] = {}
    while engine.busy:
        for event in engine.step():
            found.setdefault((event.sample.request.id, event.sample.index), []).append(tuple(event.sampled))
    engine.cache.check()
    return found


def answers(engine: Engine) -> tuple[list[list[tuple]], list[Request]]:
    """Tokens and log-probabilities of all requests together."""
    requests = [engine.add(prompt, params) for prompt, params in ASKED]
    requests.append(engine.add(text(5, 9), PLAIN, constrain=lambda k: Even()))
    found = answer(engine)
    return [found[request.id, k] for request in requests for k in range(request.params.n)], requests


@pytest.fixture
def loaded(cuda, tmp_path: Path) -> Loaded:
    return Loaded(write(tmp_path / "tiny.gguf", "llama", "BF16", ONE), cuda, max_tokens=64)


def test_answers_are_those_of_host_sampling(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, requests = answers(loaded.engine(32, 16, max_seqs=8))
    places = [dict(explain(request).sampled) for request in requests]
    assert places[0] == places[2] == {"device": 4}
    assert places[1] == {"device": 8}
    assert places[3] == {"logprobs": 4}
    assert places[4] == {"prompt_logprobs": 1, "device": 3}
    assert places[5] == {"logits_processors": 4}
    assert places[6] == {"constraint": 4}
    monkeypatch.setattr(CudaLogits, "samples", False)
    engine = loaded.engine(32, 16, max_seqs=8)
    theirs, _ = answers(engine)
    assert ours == theirs
    assert engine.stats.sampled == {"backend": 4 + 8 + 4 + 4 + 4 + 4 + 4}


def test_more_rows_than_the_logits_hold(cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits come in parts of four rows, and some rows of a part come to the host."""
    path = write(tmp_path / "tiny.gguf", "llama", "BF16", ONE)
    expected, _ = answers(Loaded(path, cuda, max_tokens=64).engine(32, 16, max_seqs=8))
    monkeypatch.setattr(program, "LOGIT_ROWS", 4)
    found, _ = answers(Loaded(path, cuda, max_tokens=64).engine(32, 16, max_seqs=8))
    assert found == expected


def test_a_request_alone_has_the_same_tokens(loaded: Loaded) -> None:
    together, _ = answers(loaded.engine(32, 16, max_seqs=8))
    engine = loaded.engine(32, 32, max_seqs=2)
    for prompt, params in ASKED[:3]:
        request = engine.add(prompt, params)
        found = answer(engine)
        assert [found[request.id, k] for k in range(params.n)] == together[: params.n]
        together = together[params.n :]


def test_logits_that_are_not_finite_fail_one_request(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded.engine(32, 16, max_seqs=2)
    good, bad = engine.add(text(3), PLAIN), engine.add(text(3, 1), PLAIN)
    sample = CudaLogits.sample
    monkeypatch.setattr(CudaLogits, "sample", lambda *args: lambda: [*sample(*args)()[:-1], -2])
    engine.step()
    monkeypatch.undo()
    found = answer(engine)
    assert "largest logit is inf" in str(bad.error)
    assert good.error is None
    assert len(good.samples[0].output) == 4
    assert (bad.id, 0) not in found
