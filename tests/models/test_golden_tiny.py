"""Every architecture and rope scaling against llama.cpp, on tiny random models: log-probabilities, all positions.

The goldens are made by scripts/golden_tiny.py from the same files. Weights and both caches are f32.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from support import tiny_gguf
from support.harness import Driven, load_weights, score

from kvarn.backends.reference import Reference
from kvarn.backends.reference.program import ReferenceProgram
from kvarn.cache.plan import CacheConfig
from kvarn.engine.sampling import log_softmax
from kvarn.loading.checkpoint import open_checkpoint

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tiny.json").read_text())


@pytest.mark.requirement(43)
@pytest.mark.parametrize("variant", tiny_gguf.VARIANTS)
def test_log_probabilities_are_those_of_llama_cpp(variant: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_gguf.write(tmp_path / "tiny.gguf", variant))
    program = ReferenceProgram(checkpoint.config, load_weights(checkpoint))
    cache = Driven(CacheConfig(checkpoint.config.layer_specs, 128, "paged", "f32"), Reference())
    ours = log_softmax(score(program, cache, tiny_gguf.tokens(variant), 0, 16))
    worst = 0.0
    for row, steps in zip(ours, GOLDEN[variant], strict=True):
        ids = [token for token, _ in steps]
        theirs = np.array([logprob for _, logprob in steps])
        worst = max(worst, float(np.abs(row[ids] - theirs).max()))
        assert row.argmax() == ids[0] or theirs[0] - theirs[1] < 1e-3
    assert worst < 2e-3, f"{variant}: log-probabilities differ by {worst}"
