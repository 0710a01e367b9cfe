"""The centre of keys: which part of the bias it is, and that attention does not see it."""

from pathlib import Path

import numpy as np
import pytest
from support import tiny_gguf
from support.harness import Driven, load_program, load_weights, score

from kvarn import LLM, native
from kvarn.backends.cpu import Cpu
from kvarn.backends.reference import Reference, dense
from kvarn.backends.reference.program import ReferenceProgram
from kvarn.bench.subject import Setup, plan_of
from kvarn.cache.plan import CacheConfig
from kvarn.cache.spec import LayerSpec
from kvarn.cli import main
from kvarn.errors import KvarnError
from kvarn.graph.ops import Centre, Rope, YarnScaling
from kvarn.loading.checkpoint import Checkpoint, open_checkpoint
from kvarn.models import centre as module
from kvarn.models.centre import centre_vector, uncentred_layers
from kvarn.models.families import graph_of
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


def quickly_turning(tmp_path: Path) -> Path:
    """A rope whose slowest pair turns more than once over the context: no part of the bias is the same in all keys."""
    return tiny_gguf.write(
        tmp_path / "turning.gguf", "qwen2", tiny_gguf.CHAT, keys={"qwen2.rope.freq_base": ("f32", 2.0)}
    )


def test_layers_whose_bias_has_no_centre(qwen: Checkpoint, tmp_path: Path) -> None:
    turning = open_checkpoint(quickly_turning(tmp_path))
    plain = open_checkpoint(tiny_gguf.write(tmp_path / "llama.gguf", "llama"))
    for checkpoint, layers in ((qwen, []), (plain, []), (turning, list(range(turning.config.n_layers)))):
        assert uncentred_layers(graph_of(checkpoint.config, checkpoint.shapes)) == layers


@pytest.mark.parametrize("codec", ["int4", "int6", "int4/int8"])
def test_keys_of_few_bits_are_refused_if_their_bias_has_no_centre(tmp_path: Path, codec: str) -> None:
    with pytest.raises(KvarnError, match=r"int\d keys would be wrong: layer 0 adds a bias .* as in --cache-type int8"):
        LLM(quickly_turning(tmp_path), cache_type=codec)
    with LLM(quickly_turning(tmp_path), cache_type="int8/int4") as llm:
        assert llm.generate("ab", max_tokens=2)
        with pytest.raises(KvarnError, match="keys would be wrong"):  # in bench and compare
            plan_of(llm, Setup(cache_type=codec), 64, 1)
    assert main(["plan", str(quickly_turning(tmp_path)), "--cache-type", codec]) == 1
