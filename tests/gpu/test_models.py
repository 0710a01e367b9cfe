"""Models of every architecture in the interpreter, against the reference: logits, hidden states, times, refusals."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gpu.support.driving import same_bits
from gpu.support.models import Batch, Loaded, text, write
from support.tiny_models import ARCHITECTURES, GOLDEN

from kvarn.backends.cuda import program as program_module
from kvarn.backends.cuda.planes import PACKED
from kvarn.backends.cuda.program import LOGIT_ROWS
from kvarn.backends.cuda.weights import _f16
from kvarn.backends.reference import Reference
from kvarn.errors import BadStep

SIZE = replace(GOLDEN, n_layers=2, window=6)  # a local and, if the architecture has them, a global layer
ONE = replace(SIZE, n_layers=1)
WIDE = replace(ONE, n_heads=8, n_kv_heads=4, hidden=256, feed_forward=512)  # blocks of 256 fit
TOKENS = text(20)
# Largest difference of logits relative to the largest logit: what rounding of inputs to the matrices' form moves.
LIMITS = {"F32": 3e-6, "F16": 4e-3, "BF16": 3e-2, "Q8_0": 4e-2}
CELLS = {"F32": "f32", "F16": "f16", "BF16": "bf16", "Q8_0": "bf16"}


def near(found: np.ndarray, expected: np.ndarray, limit: float) -> bool:
    return found.shape == expected.shape and bool(np.abs(found - expected).max() < limit * np.abs(expected).max())


def hidden(loaded: Loaded, tokens: Sequence[int], rows: Sequence[int]) -> np.ndarray:
    memory, book = loaded.cache(64, codec="f32")
    book.open(0)
    assert book.reserve(0, len(tokens))
    return loaded.program.hidden(memory, book.prepare([0]), tokens, rows).copy()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("type_name", LIMITS)
def test_a_model_gives_what_the_reference_gives(cuda, tmp_path: Path, architecture: str, type_name: str) -> None:
    path = write(tmp_path / "tiny.gguf", architecture, type_name, SIZE)
    ours, theirs = Loaded(path, cuda), Loaded(path, Reference())
    codec = CELLS[type_name]
    found = ours.logits(TOKENS, 20, codec=codec)
    assert near(found, theirs.logits(TOKENS, 20, codec=codec), LIMITS[type_name])
    assert same_bits(ours.logits(TOKENS, 7, codec=codec), found), "chunks do not change a bit"
    if type_name == "F32":
        rows = [0, 3, 19]
        assert near(hidden(ours, TOKENS, rows), hidden(theirs, TOKENS, rows), LIMITS[type_name])
        assert hidden(ours, TOKENS, []).shape == (0, SIZE.hidden)


def rows_are_near(found: np.ndarray, expected: np.ndarray) -> bool:
    """All but one, whose attention may be between two tokens of nearly equal scores."""
    errors = np.sort(np.abs(found - expected).max(1) / np.abs(expected).max())
    return bool(errors[-2] < LIMITS["F16"] and errors[-1] < LIMITS["Q8_0"])


@pytest.mark.parametrize("type_name", PACKED)
def test_packed_types(cuda, tmp_path: Path, type_name: str) -> None:
    path = write(tmp_path / "tiny.gguf", "llama", type_name, WIDE)
    ours, theirs = Loaded(path, cuda), Loaded(path, Reference())
    found = ours.logits(TOKENS, 20, codec="f16")
    assert rows_are_near(found, theirs.logits(TOKENS, 20, codec="f16"))
    assert same_bits(ours.logits(TOKENS, 7, codec="f16"), found)
    assert {call.name for call in cuda._driver.launches()} >= {"linear_packed", "embed_packed"}
    assert not cuda._driver.launches("linear")


def test_types_of_one_model_may_differ(cuda, tmp_path: Path) -> None:
    """As in files of Q4_K_M. Matrices of one input are several products, and read it in one form."""
    others = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "ffn_up": "Q3_K"}
    path = write(tmp_path / "tiny.gguf", "gemma3", "Q4_K", WIDE, others=others)
    ours, theirs = Loaded(path, cuda), Loaded(path, Reference())
    found = ours.logits(TOKENS, 20, codec="f16")
    assert rows_are_near(found, theirs.logits(TOKENS, 20, codec="f16"))
    names = [operation.name.replace("blk.0.", "") for operation in ours.program._emitted.operations]
    assert {"attn_q+attn_k", "attn_v", "ffn_gate", "ffn_up", "ffn_down"} <= set(names)
    read = [call.argument("x") for call in cuda._driver.launches() if call.name.startswith("linear")]
    assert read[0] == read[1], "q and k, and v"


@pytest.fixture
def loaded(cuda, tmp_path: Path) -> Loaded:
    return Loaded(write(tmp_path / "tiny.gguf", "llama", "BF16", ONE), cuda, max_tokens=16)


def test_only_the_wanted_rows_are_computed(loaded: Loaded) -> None:
    """Also none at all, as in a step that ends inside of a prompt."""
    memory, book = loaded.cache(64)
    book.open(0)
    whole = loaded.logits(TOKENS, 20)
    done = 0
    for n, wanted in ((8, []), (7, [0, 6]), (5, [4])):
        assert book.reserve(0, done + n)
        rows = loaded.program.run(memory, book.prepare([0]), TOKENS[done : done + n], wanted).rows()
        assert same_bits(rows, whole[[done + row for row in wanted]])
        book.advance(0, n)
        book.commit(0, TOKENS[done : done + n])
        done += n


def test_more_logits_than_the_device_keeps_rows_for(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = loaded.logits(TOKENS, 20)
    before = len(loaded.backend._driver.launches("linear"))
    monkeypatch.setattr(program_module, "LOGIT_ROWS", 8)
    assert LOGIT_ROWS > 20
    assert same_bits(loaded.logits(TOKENS, 20), whole)
    grids = [call.argument("n_rows") for call in loaded.backend._driver.launches("linear")[before:]]
    assert grids[-3:] == [8, 8, 4]


def test_a_step_larger_than_the_workspace_enlarges_it(loaded: Loaded) -> None:
    small = loaded.program.workspace
    by_ones = loaded.logits(TOKENS, 4)
    assert loaded.program.workspace == small
    tokens = TOKENS * 14
    whole = loaded.logits(tokens, len(tokens))
    assert loaded.program.workspace > small
    assert same_bits(whole[:20], by_ones)
    assert same_bits(loaded.logits(TOKENS, 4), by_ones), "after it has moved"


def test_a_repeated_step_allocates_nothing(loaded: Loaded) -> None:
    batch = Batch(loaded, 64, 3)
    batch.step(dict.fromkeys(range(3), TOKENS[:5]))
    batch.step({seq: [1] for seq in range(3)})
    calls = loaded.backend._driver.calls
    before = len(calls)
    for _ in range(4):
        batch.step({seq: [1] for seq in range(3)})
    verbs = {call.verb for call in calls[before:]}
    assert verbs == {"wait", "send", "record", "replay", "launch", "download"}, "no allocation, no other wait"


def test_sequences_together_have_the_bits_that_they_have_alone(loaded: Loaded) -> None:
    texts = [text(n + 2, n) for n in (1, 9, 14)]
    batch = Batch(loaded, 64, 3)
    found = [[batch.step({seq: texts[seq][:-2]})[seq]] for seq in (0, 1)] + [[]]
    rows = batch.step({0: texts[0][-2:-1], 1: texts[1][-2:-1], 2: texts[2][:-2]})
    for seq in range(3):
        found[seq].append(rows[seq])
    rows = batch.step({0: texts[0][-1:], 1: texts[1][-1:], 2: texts[2][-2:-1]})
    for seq in range(3):
        found[seq].append(rows[seq])
    for seq, tokens in enumerate(texts):
        ours = np.concatenate(found[seq])
        alone = loaded.logits(tokens, len(tokens), len(tokens) - 3)
        assert same_bits(ours, alone[: len(ours)]), seq


@pytest.mark.parametrize(
    ("tokens", "wanted", "words"),
    [
        ([1, 2], [0], "the step has 3 positions, and 2 tokens were given"),
        ([1, 2, -1], [0], "a token is outside of the vocabulary, 0 to 258"),
        ([1, 2, 259], [0], "a token is outside of the vocabulary, 0 to 258"),
        ([1, 2, 3], [3], "a wanted row is outside of the step, 0 to 2"),
        ([1, 2, 3], [-1], "a wanted row is outside of the step, 0 to 2"),
        ([1, 2, 3], [0, 0, 1, 2], "4 rows of a step of 3 tokens are wanted"),
    ],
)
def test_wrong_numbers_are_refused(loaded: Loaded, tokens: list[int], wanted: list[int], words: str) -> None:
    memory, book = loaded.cache(64)
    book.open(0)
    assert book.reserve(0, 3)
    step = book.prepare([0])
    before = len(loaded.backend._driver.calls)
    with pytest.raises(BadStep, match=words):
        loaded.program.run(memory, step, tokens, wanted)
    assert len(loaded.backend._driver.calls) == before, "nothing was sent"


def test_times(loaded: Loaded) -> None:
    """The recording driver's clock ticks once per event."""
    loaded.program.trace(True)
    batch = Batch(loaded, 64, 2)
    batch.step({0: TOKENS[:5]})
    batch.step({0: [1], 1: [2, 3]})
    spans = loaded.program.timings()
    steps = [span for span in spans if span.name == "step"]
    assert [span.facts for span in steps] == [{"tokens": 5, "rows": 1}, {"tokens": 3, "rows": 2}]
    assert spans[:2] == steps, "steps first"
    names = [span.name for span in spans[2:]]
    assert names.count("prefill 0") == 2
    assert names.count("decode 0") == 1, "in the second step only"
    assert all(span.begin <= span.end for span in spans)
    assert loaded.program.timings() == []
    assert batch.memory.counters.seconds == {"prefill": 2e-3, "decode": 1e-3}


def test_some_steps_are_timed_without_a_trace(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one counts once, and a later one for all steps since the last that was timed."""
    monkeypatch.setattr(program_module, "SAMPLED", 16)
    batch = Batch(loaded, 24, 1)
    batch.step({0: TOKENS[:5]})
    for _ in range(16):
        batch.step({0: [1]})
    assert loaded.program.timings() == []
    assert batch.memory.counters.seconds == {"prefill": 1e-3, "decode": pytest.approx(16e-3)}


def test_a_trace_has_the_steps_that_were_traced(loaded: Loaded) -> None:
    batch = Batch(loaded, 64, 1)
    batch.step({0: TOKENS[:5]})
    loaded.program.trace(True)
    batch.step({0: [1]})
    loaded.program.trace(False)
    assert [span.facts["tokens"] for span in loaded.program.timings() if span.name == "step"] == [1]


def test_weights_beyond_f16(cuda, tmp_path: Path) -> None:
    """They become its largest number. Packed ones are multiplied by a power of two."""
    path = write(tmp_path / "tiny.gguf", "llama", "Q8_0", ONE, {"blk.0.ffn_down.weight": 1e6})
    found, expected = (Loaded(path, backend).logits(TOKENS, 20, codec="f16") for backend in (cuda, Reference()))
    assert near(found, expected, LIMITS["F16"])
    big = np.array([[1e6, -1e6, 3e-5, 65504.0]], np.float32)
    assert (_f16(big).view(np.float16) == np.array([[65504, -65504, 3e-5, 65504]], np.float16)).all()


@pytest.mark.parametrize("type_name", ["F32", "BF16"])
@pytest.mark.parametrize("width", [97, 98])
def test_odd_widths(cuda, tmp_path: Path, type_name: str, width: int) -> None:
    """What lies beside an odd width begins at an aligned address: the recording driver checks it."""
    path = write(tmp_path / "tiny.gguf", "llama", type_name, replace(ONE, feed_forward=width, vocab_size=259))
    found, expected = (Loaded(path, backend).logits(TOKENS, 20, codec="f32") for backend in (cuda, Reference()))
    assert near(found, expected, LIMITS[type_name])


def test_rows_are_used_again(cuda, tmp_path: Path) -> None:
    """More layers do not take more rows: a value that is not read again gives its rows back."""
    shapes = []
    for n_layers in (1, 4):
        path = write(tmp_path / f"{n_layers}.gguf", "llama", "BF16", replace(SIZE, n_layers=n_layers))
        rows = Loaded(path, cuda).program._emitted.workspace.rows
        shapes.append(sorted((each.form, each.width, each.padded) for each in rows))
    assert len(shapes[1]) <= len(shapes[0]) + 1
    assert len(shapes[1]) < 14


def test_bytes_of_weights(cuda, tmp_path: Path) -> None:
    """A tied embedding counts once, and types that are not packed become f16."""
    sizes = {}
    for type_name in ("F32", "BF16", "Q3_K", "Q8_0", "Q4_0"):
        path = write(tmp_path / f"{type_name}.gguf", "gemma3", type_name, WIDE)
        loaded = Loaded(path, cuda)
        sizes[type_name] = loaded.program.nbytes
        assert loaded.program.nbytes == sum(cuda._driver.live.values()) - loaded.program.workspace - _constants(loaded)
        del loaded
    assert sizes["Q3_K"] == sizes["BF16"] < 0.6 * sizes["F32"]
    assert 0.53 < sizes["Q8_0"] / sizes["BF16"] < 0.55
    assert 0.28 < sizes["Q4_0"] / sizes["BF16"] < 0.31


def _constants(loaded: Loaded) -> int:
    return sum(each.nbytes for each in loaded.program._emitted.kept)
