"""Sampling settings of a model that are no numbers, or too large: they are left out, and the model loads."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvarn.loading.own_sampling import own_sampling

HUGE = 10**400


def of_gguf(**keys: object) -> dict[str, float]:
    metadata = {f"general.sampling.{key}": value for key, value in keys.items()}
    checkpoint: Any = SimpleNamespace(folder=None, path=Path("m.gguf"), metadata=metadata)
    return own_sampling(checkpoint)


@pytest.mark.parametrize("value", [np.array([1, 2]), np.array([]), [-1], "x", {}, HUGE, -HUGE, float("nan"), True])
def test_left_out(value: object, caplog: pytest.LogCaptureFixture) -> None:
    assert of_gguf(temp=value, top_k=value, top_p=value, min_p=value, penalty_repeat=value) == {}
    assert caplog.text.count("out of range") == 5
    assert len(caplog.messages[0]) < 150


def test_a_folder(tmp_path: Path) -> None:
    text = f'{{"temperature": {HUGE}, "top_k": {HUGE}, "min_p": [1], "top_p": 0.9}}'
    (tmp_path / "generation_config.json").write_text(text)
    checkpoint: Any = SimpleNamespace(folder=tmp_path)
    assert own_sampling(checkpoint) == {"top_p": 0.9}


def test_numbers_are_kept() -> None:
    assert of_gguf(temp=0.5, top_k=-1, top_p=1) == {"temperature": 0.5, "top_k": 0, "top_p": 1.0}
