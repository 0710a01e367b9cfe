"""Snapshots through the Python API: used only where their cells are the bits that would be computed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import tiny_gguf
from support.tiny_models import GOLDEN

from kvarn import LLM, SamplingParams, arithmetic, native
from kvarn.engine.explain import explain, in_words
from kvarn.errors import BadSnapshot, KvarnError
from kvarn.lasting import container
from kvarn.lasting import snapshot as files
from kvarn.lasting.snapshot import SnapshotFile
from kvarn.loading.checkpoint import open_checkpoint

TEXT = [(7 * i * i + 3 * i) % 250 for i in range(150)]
DRAWN = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "seed": 5}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny_gguf.write(folder / "m.gguf", "llama", tiny_gguf.CHAT, replace(GOLDEN, context=512))


def load(path: Path, **settings) -> LLM:
    return LLM(path, **{"cache": "paged", "context": 256, "backend": "cpu", "threads": 1, "max_seqs": 2} | settings)


@pytest.fixture(scope="module")
def made(path: Path) -> Path:
    with load(path, block_size=16) as llm:
        llm.save_snapshot(path.with_name("x.kvs"), TEXT)
    return path.with_name("x.kvs")


@pytest.mark.parametrize("strategy", ["paged", "contiguous", "ring", "sinks", "sliding", "head-major"])
def test_an_answer_from_a_snapshot_is_the_answer_without_it(path: Path, made: Path, strategy: str) -> None:
    with load(path) as llm:
        plain = llm.generate([TEXT], max_tokens=20, **DRAWN)[0]
    with load(path, cache=strategy, snapshot=made) as llm:
        for n_reused in (149, 149):  # a second request finds it, too
            job = llm.start(TEXT, plain.params)
            llm.runner.wait(job)
            assert job.output().tokens == plain.tokens
            assert job.output().cached_tokens == n_reused
            assert "(149 from snapshot x.kvs, read in " in in_words(explain(job.request), str)
        assert llm.snapshots.verify(made, 8, 1, lambda *_: None) == 8
        llm.cache.check()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_snapshot_has_whole_tiles_of_cells_with_a_tail(path: Path, tmp_path, backend: str) -> None:
    """The file has all tokens. Those after the last whole tile are computed again, and so is a text without one."""
    given = {"cache_type": "int8/int4", "backend": backend}
    with load(path, **given) as llm:
        plain = llm.generate([TEXT], max_tokens=8, logprobs=1, **DRAWN)[0]
        llm.save_snapshot(tmp_path / "text.kvs", TEXT)
        llm.save_snapshot(tmp_path / "answer.kvs", llm.generate([TEXT], max_tokens=3, logprobs=1, **DRAWN)[0])
        llm.save_snapshot(tmp_path / "short.kvs", TEXT[:20])
    with SnapshotFile(tmp_path / "text.kvs") as file:
        assert file.facts.n_tokens == 150
    for strategy in ("contiguous", "sliding"):
        with load(path, cache=strategy, snapshot=tmp_path / "text.kvs", **given) as llm:
            job = llm.start(TEXT, plain.params)
            llm.runner.wait(job)
            assert job.output().tokens == plain.tokens
            assert job.output().cached_tokens == 128
            assert "(128 from snapshot text.kvs, read in " in in_words(explain(job.request), str)
            assert llm.snapshots.verify(tmp_path / "text.kvs", 3, 1, lambda *_: None) == 3
            assert llm.snapshots.verify(tmp_path / "text.kvs", 10**6, 1, lambda *_: None) == 128
            llm.cache.check()
        with load(path, cache=strategy, **given) as llm:
            assert llm.resume(tmp_path / "answer.kvs", max_tokens=5).tokens == plain.tokens
            short = llm.snapshots.load(tmp_path / "short.kvs")
            assert short.tokens == TEXT[:20]
            assert llm.generate([TEXT[:30]], max_tokens=1)[0].cached_tokens == 0
            llm.cache.check()


@pytest.mark.parametrize("strategy", ["paged", "sliding"])
def test_a_text_longer_than_its_window_is_reused_whole_wherever_it_ends(path: Path, tmp_path, strategy: str) -> None:
    """Also in the middle of a block. The cells before the window of its last token are not in the file."""
    settings = dict(cache=strategy, window=40, block_size=16)
    with load(path, **settings) as llm:
        for n in range(112, 129):
            llm.save_snapshot(tmp_path / f"{n}.kvs", TEXT[:n])
        plain = llm.generate([TEXT], max_tokens=4, **DRAWN)[0]
    for n in range(112, 129):
        with load(path, **settings, snapshot=tmp_path / f"{n}.kvs") as llm:
            found = llm.generate([TEXT], plain.params)[0]
            assert (found.tokens, found.cached_tokens) == (plain.tokens, n)
            llm.cache.check()


@pytest.mark.parametrize("strategy", ["paged", "contiguous", "sinks"])
def test_a_drawn_answer_goes_on_to_the_bit_in_another_process_and_order(path: Path, tmp_path, strategy: str) -> None:
    with load(path) as llm:
        whole = llm.generate([TEXT], max_tokens=20, n=2, logprobs=1, **DRAWN)[0]
        part = llm.generate([TEXT], max_tokens=7, logprobs=1, **DRAWN)[0]
        assert part.tokens == whole.tokens[:7]
        llm.save_snapshot(tmp_path / "a.kvs", part)
    with load(path, cache=strategy, max_seqs=1) as llm:
        rest = llm.resume(tmp_path / "a.kvs", max_tokens=13)
        assert rest.tokens == whole.tokens
        assert rest.text == whole.text
        assert [each.logprob for each in rest.completions[0].logprobs] == [
            each.logprob for each in whole.completions[0].logprobs[7:]
        ]
        assert rest.cached_tokens == len(TEXT) + 6
        llm.cache.check()


def test_every_instruction_set_continues_the_same_answer(path: Path, tmp_path) -> None:
    best, answers = native.isa(), []
    with load(path) as llm:
        llm.save_snapshot(tmp_path / "a.kvs", llm.generate([TEXT], max_tokens=7, **DRAWN)[0])
    try:
        for isa in native.isas():
            native.select_isa(isa)
            with load(path) as llm:
                answers.append(llm.resume(tmp_path / "a.kvs", max_tokens=13).tokens)
    finally:
        native.select_isa(best)
    assert answers == answers[:1] * len(answers)


def test_an_answer_that_has_ended_and_a_text_do_not_go_on(path: Path, made: Path, tmp_path) -> None:
    with load(path) as llm:
        first = llm.generate([TEXT], max_tokens=1)[0].tokens[0]
        ended = llm.generate([TEXT], max_tokens=9, stop_token_ids=[first])[0]
        assert ended.finish_reason == "stop"
        llm.save_snapshot(tmp_path / "a.kvs", ended)
        for each in (made, tmp_path / "a.kvs"):
            with pytest.raises(BadSnapshot, match="no answer that could go on"):
                llm.resume(each)
        with pytest.raises(KvarnError, match="cannot go on"):
            llm.save_snapshot(tmp_path / "b.kvs", llm.generate([TEXT], max_tokens=3, regex="[a-c]+")[0])


def other_weights(path: Path) -> Path:
    raw, place = bytearray(path.read_bytes()), open_checkpoint(path).place("blk.0.attn_q.weight").info.offset
    raw[place] ^= 1
    path.with_name("other.gguf").write_bytes(raw)
    return path.with_name("other.gguf")


def refusals(path: Path) -> dict[str, tuple[Path, dict, str]]:
    return {
        "weights": (other_weights(path), {}, "other weights"),
        "codec": (path, {"cache_type": "int8"}, "cache type bf16, and here it is int8"),
        "backend": (path, {"backend": "reference"}, "backend cpu, and here it is reference"),
        "window": (path, {"cache": "sliding", "window": 40}, "other windows: 3 all there, 3 40 here"),
        "context": (path, {"context": 128}, "raise the context"),
    }


def test_what_would_have_other_bits_is_refused_and_nothing_changes(path: Path, made: Path, monkeypatch) -> None:
    for name, (model, settings, reason) in refusals(path).items():
        with load(model, **settings) as llm:
            llm.generate([[1, 2, 3] * 8], max_tokens=2)
            before = llm.cache.picture()
            with pytest.raises(BadSnapshot, match=reason):
                llm.load_snapshot(made)
            assert llm.cache.picture() == before, name
            llm.cache.check()
    with load(path) as llm:
        order = native.sum_order()
        native.select_sum_order(next(each for each in native.SUM_ORDERS if each != order))
        try:
            with pytest.raises(BadSnapshot, match=f"KVARN_SUM_ORDER={order}"):
                llm.load_snapshot(made)
        finally:
            native.select_sum_order(order)
        monkeypatch.setattr(arithmetic, "VERSION", arithmetic.VERSION + 1)
        with pytest.raises(BadSnapshot, match="version of the arithmetic"):
            llm.load_snapshot(made)


def test_damage_in_every_region_is_refused_and_nothing_changes(path: Path, made: Path, tmp_path) -> None:
    raw, bad = made.read_bytes(), tmp_path / "bad.kvs"
    header = 8 + int.from_bytes(raw[:8], "little")
    places = [*range(0, header, 97), *np.linspace(header, len(raw) - 1, 40).astype(int).tolist()]
    with load(path) as llm:
        llm.generate([[1, 2, 3] * 8], max_tokens=2)
        before = llm.cache.picture()
        for at in places:
            bad.write_bytes(raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :])
            with pytest.raises(BadSnapshot) as error:
                llm.load_snapshot(bad)
            assert "\n" not in str(error.value)
        for length in (0, 7, 100, header, header + 1000, len(raw) - 1):
            bad.write_bytes(raw[:length])
            with pytest.raises(BadSnapshot):
                llm.load_snapshot(bad)
        assert llm.cache.picture() == before
        llm.cache.check()


def rewritten(made: Path, to: Path, change) -> Path:
    """A file with other texts or tensors whose digests are right: somebody made it on purpose."""
    with container.Container(made) as file:
        tensors = {name: (tensor, file.read(name)) for name, tensor in file.tensors.items()}
        texts = dict(file.texts)
    change(texts, tensors)
    container.write(to, texts, tensors)
    return to


def test_files_made_on_purpose_are_refused_too(path: Path, made: Path, tmp_path) -> None:
    def token(texts, tensors):
        tensors["tokens"] = tensors["tokens"][0], np.full(150, 2**31, np.uint32).view(np.uint8)

    def drop(texts, tensors):
        del tensors["v.1"]

    def shape(texts, tensors):
        tensors["k.0"] = (
            tensors["k.0"][0]._replace(shape=(150 * 2, *tensors["k.0"][0].shape[1:])),
            np.repeat(tensors["k.0"][1], 2),
        )

    def version(texts, tensors):
        texts["format"] = "kvarn snapshot 2"

    def holes(texts, tensors):
        texts["holes"] = json.dumps([[0, 149]] * 3)

    def nonsense(texts, tensors):
        texts["holes"] = json.dumps([["NaN", {}]])

    def many(texts, tensors):
        texts["holes"] = json.dumps([[0, 10**9]] * 3)

    def answer(texts, tensors):
        texts["answer"] = json.dumps({"start": 10**9, "seed": 1, "sample": 0, "settings": {}})

    def extra(texts, tensors):
        tensors["x"] = tensors["k.0"]

    with load(path) as llm:
        before = llm.cache.picture()
        for change in (token, drop, shape, version, holes, nonsense, many, answer, extra):
            with pytest.raises(BadSnapshot) as error:
                llm.load_snapshot(rewritten(made, tmp_path / "bad.kvs", change))
            assert "\n" not in str(error.value), change

        def settings(texts, tensors):
            given = {"start": 100, "seed": 1, "sample": 0, "settings": {"temperature": "hot", "n": 10**9}}
            texts["answer"] = json.dumps(given)

        with pytest.raises(BadSnapshot, match="settings"):
            llm.resume(rewritten(made, tmp_path / "bad.kvs", settings))
        assert llm.cache.picture() == before


def test_cells_that_the_model_does_not_compute_fail_the_verification(path: Path, made: Path, tmp_path) -> None:
    def change(texts, tensors):
        tensors["k.1"][1][-1] ^= 1  # of the last token

    bad = rewritten(made, tmp_path / "bad.kvs", change)
    with load(path) as llm:
        with pytest.raises(BadSnapshot, match="token 149 in layer 1"):
            llm.snapshots.verify(bad, 149, 0, lambda *_: None)
        with pytest.raises(BadSnapshot, match="token 149 in layer 1"):
            llm.snapshots.verify(bad, 10**6, 0, lambda *_: None)
        llm.cache.check()
    with load(path, cache="ring", window=40) as llm:
        llm.save_snapshot(tmp_path / "ring.kvs", TEXT)
        assert 40 <= llm.snapshots.verify(tmp_path / "ring.kvs", 8, 0, lambda *_: None) < 150


def test_a_system_message_is_shared_by_all_conversations(path: Path, tmp_path) -> None:
    system = {"role": "system", "content": "be nice " * 5}
    with load(path) as llm:
        facts = llm.save_snapshot(tmp_path / "s.kvs", [system])
        answers = [llm.chat([system, {"role": "user", "content": each}], max_tokens=4, seed=1).tokens for each in "xy"]
    with load(path, snapshot=tmp_path / "s.kvs") as llm:
        for text, tokens in zip("xy", answers, strict=True):
            found = llm.chat([system, {"role": "user", "content": text}], max_tokens=4, seed=1)
            assert found.tokens == tokens
            assert found.cached_tokens >= facts.n_tokens
    with SnapshotFile(tmp_path / "s.kvs") as file:
        assert file.facts.model == "m.gguf"  # no folders: the file may go to others
        assert files.FORMAT == "kvarn snapshot 1"


def test_tokens_that_were_evicted_and_computed_again_do_not_count_as_restored(path: Path, made: Path) -> None:
    with load(path, snapshot=made, max_seqs=1, context=160) as llm:
        llm.generate([[1] * 40], max_tokens=2)
        llm.generate([[2] * 40], max_tokens=2)  # a priority lets eviction skip the blocks of a snapshot once
        found = []
        for _ in range(2):
            job = llm.start(TEXT, SamplingParams(max_tokens=2))
            llm.runner.wait(job)
            found.append((job.request.adoption.reused, job.request.source.tokens))
        (reused, first), (again, second) = found
        assert reused == first == second < 149 == again
