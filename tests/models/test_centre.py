"""The centre of keys: which part of the bias it is, and that attention does not see it."""

import numpy as np
import pytest
from support import tiny_gguf
from support.harness import Driven, load_program, load_weights, score

from kvarn import native
from kvarn.backends.cpu import Cpu
from kvarn.backends.reference import Reference, dense
from kvarn.backends.reference.program import ReferenceProgram
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec
from kvarn.graph.ops import Centre, Rope, YarnScaling
from kvarn.loading.checkpoint import Checkpoint, open_checkpoint
from kvarn.models import centre as module
from kvarn.models.centre import centre_vector
from kvarn.models.rope import frequencies, magnitude

BIAS = np.arange(1, 33, dtype=np.float32)  # two heads of 16


def test_the_centre_is_the_bias_in_pairs_that_hardly_turn() -> None:
    """Frequencies of four pairs are 1, 0.1, 0.01, 0.001; after 100 positions the last two have turned 1 radian at most.
    Numbers past rope.dim are not rotated, and are not centred either."""
    centre = centre_vector(Centre("bias", Rope(1e4, 8), 100), BIAS, 2)
    assert centre.tolist() == [0, 0, 3, 4, 0, 0, 7, 8, *[0] * 8, 0, 0, 19, 20, 0, 0, 23, 24, *[0] * 8]
    assert centre.dtype == np.float32
    assert not centre_vector(Centre("bias", Rope(1e4, 8), 1001), BIAS, 2).any()


def test_the_centre_has_the_magnitude_of_rotated_keys() -> None:
    rope = Rope(1e4, 16, YarnScaling(4.0, 64))
    found = centre_vector(Centre("bias", rope, 256), BIAS, 2).reshape(2, 2, 8)
    slow = frequencies(rope) * 256 <= 1
    assert 0 < slow.sum() < 8
    expected = np.where(slow, BIAS.astype(np.float64).reshape(2, 2, 8) * magnitude(rope), 0).astype(np.float32)
    assert (found == expected).all()


def test_attention_does_not_see_the_centre() -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((40, heads, 16)) for heads in (4, 2, 2))
    centre, spec = 50 * rng.standard_normal((1, 2, 16)), LayerSpec(4, 2, 16, 16)
    with_it, without = (dense.attend(q, keys, v, spec, 0.25) for keys in (k + centre, k))
    assert np.abs(with_it - without).max() < 1e-12


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(tiny_gguf.write(tmp_path_factory.mktemp("tiny") / "qwen2.gguf", "qwen2"))


def logits(checkpoint: Checkpoint, name: str, codec: str = "f32", chunk: int = 60) -> np.ndarray:
    pool = native.Pool(1)
    slow = name == "reference"
    program = (
        ReferenceProgram(checkpoint.config, load_weights(checkpoint), pool) if slow else load_program(checkpoint, pool)
    )
    config = CacheConfig(program.config.layer_specs, 128, "paged", codec, block_size=16)
    return score(program, Driven(config, Reference(pool) if slow else Cpu(pool)), tiny_gguf.tokens("qwen2"), 0, chunk)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_model_computes_the_same_with_and_without_a_centre(
    qwen: Checkpoint, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to rounding; with f32 cells. The bits differ, so the centre is in use."""
    centred = logits(qwen, name)
    monkeypatch.setattr(module, "MOST_TURNED", -1.0)
    plain = logits(qwen, name)
    assert (plain != centred).any()
    assert np.abs(plain - centred).max() < (1e-4 if name == "reference" else 0.05) * np.abs(plain).max()


def test_prefill_and_decode_centre_alike(qwen: Checkpoint) -> None:
    whole, pieces = (logits(qwen, "cpu", "bf16", chunk) for chunk in (60, 1))
    assert (whole.view(np.uint32) == pieces.view(np.uint32)).all()
