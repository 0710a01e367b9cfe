"""Real models on the native backend: the whole [T, vocabulary] array, compared as integers, whatever the batch, the
chunks, the threads, the cache, the instruction set and whoever else wants the processor.

smollm2 as it is (Q4_1), and widened into Hugging Face folders of bf16 and f32; gemma and qwen (K types).
"""

import json
import math
import struct
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support import tiny_files
from support.golden import NOISY_LEAD, agreement, golden, sure_tokens, wikitext
from support.harness import Driven, bits, load_program, load_weights, pool, score, using
from support.models import model

from kvarn import native
from kvarn.backends.cpu import Cpu
from kvarn.backends.cpu.program import CpuProgram
from kvarn.backends.reference import Reference
from kvarn.backends.reference.program import ReferenceProgram
from kvarn.cache.codec import CODECS
from kvarn.cache.plan import CacheConfig
from kvarn.cache.strategy import STRATEGIES
from kvarn.engine.scoring import perplexity
from kvarn.loading.checkpoint import Checkpoint, open_checkpoint
from kvarn.models.families import graph_of

MODELS = ("qwen", "gemma", "smollm2-f32", "smollm2-bf16", "smollm2")
TOKENS = {"qwen": 33, "gemma": 70}  # of the text; the others take more
SLOW_TOKENS = {"qwen": 1, "smollm2": 6}  # for the portable kernels


class Ready(NamedTuple):
    name: str
    checkpoint: Checkpoint
    program: CpuProgram
    texts: tuple[list[int], list[int]]
    expected: tuple[np.ndarray, np.ndarray]  # of each text, in one piece, in one thread

    @property
    def few_steps(self) -> int | None:
        """Tokens to decode one by one. The widened copies read 270 and 540 MB per step; their lengths are those of the
        file as it is, which decodes the whole text."""
        return 12 if "-" in self.name else None

    def on(self, threads: int) -> CpuProgram:
        """The same weights on the instruction set in use and another pool."""
        config = self.checkpoint.config
        return CpuProgram(config, self.program.weights, graph_of(config, self.checkpoint.shapes), pool(threads))


def cache_for(program: CpuProgram | ReferenceProgram, backend=None, **more) -> Driven:
    settings = dict(context=160, max_chunk=160, strategy="paged", codec="bf16") | more
    return Driven(CacheConfig(program.config.layer_specs, **settings), backend or Cpu(pool()))


def logits(program: CpuProgram, tokens: list[int], chunk: int = 512, **cache) -> np.ndarray:
    return score(program, cache_for(program, **cache), tokens, 0, chunk)


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool((bits(found) == bits(expected[: len(found)])).all())


@pytest.fixture(scope="session")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """smollm2 as Hugging Face folders. Its numbers are those of the Q4_1 file, rounded for bf16."""
    checkpoint, folder = open_checkpoint(model("smollm2")), tmp_path_factory.mktemp("smollm2")
    return {kind: write_folder(checkpoint, folder / kind, kind) for kind in ("F32", "BF16")}


def write_folder(checkpoint: Checkpoint, folder: Path, kind: str) -> Path:
    config, width = checkpoint.config, {"F32": 4, "BF16": 2}[kind]
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden,
        "intermediate_size": config.feed_forward,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.base,
        "tie_word_embeddings": True,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    header, at = {}, 0
    for info in checkpoint.infos:
        size = width * math.prod(info.shape)
        name = tiny_files.hf_name("llama", info.name)
        header[name] = {"dtype": kind, "shape": list(info.shape), "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for info in checkpoint.infos:
            file.write(tiny_files.encode(checkpoint.tensor(info.name), kind))
    return folder


@pytest.fixture(scope="module", params=MODELS)
def ready(request: pytest.FixtureRequest) -> Ready:
    name, _, kind = request.param.partition("-")
    path = request.getfixturevalue("copies")[kind.upper()] if kind else model(name)
    checkpoint = open_checkpoint(path)
    program = load_program(checkpoint, pool(1))
    n = TOKENS.get(name, 100 if not kind else 40)
    tokens = golden(name)["tokens"]
    texts = tokens[:n], tokens[n : 2 * n]
    return Ready(request.param, checkpoint, program, texts, tuple(logits(program, text) for text in texts))


@pytest.mark.requirement(25)
@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_and_threads_do_not_change_a_bit(ready: Ready, threads: int) -> None:
    """1 is decode: the same bits as prefill."""
    program = ready.on(threads)
    for chunk in (1, 7, 64, 512):
        text = ready.texts[0][: ready.few_steps] if chunk == 1 else ready.texts[0]
        assert same(logits(program, text, chunk), ready.expected[0]), chunk


def choices(name: str) -> list[dict]:
    """Every lossless strategy, layout and block size. (Pinned tokens change what Gemma's local layers see.)"""
    found = [dict(strategy=strategy, pinned=0) for strategy in STRATEGIES]
    layouts = ("token-major", "head-major", "panel", "columns", "repeated")
    found += [dict(strategy="paged", layout=layout) for layout in layouts]
    return found + [dict(strategy=strategy, block_size=size) for strategy in ("paged", "ring") for size in (16, 32, 64)]


@pytest.mark.requirement(34)
def test_strategies_layouts_and_block_sizes_do_not_change_a_bit(ready: Ready) -> None:
    program, text = ready.on(2), ready.texts[0][: 9 if ready.few_steps else 20]  # a chunk, and a token
    for choice in choices(ready.name):
        assert same(logits(program, text, 8, **choice), ready.expected[0]), choice


@pytest.mark.requirement(21)
@pytest.mark.parametrize("batch", [1, 4, 16, 32])
def test_batches_do_not_change_a_bit(ready: Ready, batch: int) -> None:
    """Two texts by turns, of many lengths, in chunks of many sizes, all in the same steps."""
    program = ready.on(2)
    cache = cache_for(program, max_seqs=batch)
    longest = 6 if ready.few_steps else 12 if ready.name == "qwen" else len(ready.texts[0])
    lengths = {seq: longest - seq * longest // (2 * batch) for seq in range(batch)}
    for seq in lengths:
        cache.open(seq)
    turn = 0
    while live := {seq: n for seq, n in lengths.items() if cache.length(seq) < n}:
        sizes = (1, 7, 1, 33, 3)
        parts: dict[int, list[int]] = {}
        for seq, n in live.items():
            start = cache.length(seq)
            stop = min(n, start + sizes[(seq + turn) % len(sizes)])
            parts[seq] = ready.texts[seq % 2][start:stop]
            assert cache.reserve(seq, stop)
        step = cache.book.prepare(list(parts))
        tokens = [token for seq in step.seqs for token in parts[seq]]
        found = program.run(cache.memory, step, tokens, range(len(tokens))).rows()
        at = 0
        for seq in step.seqs:
            start, n = cache.length(seq), len(parts[seq])
            assert same(found[at : at + n], ready.expected[seq % 2][start:]), (seq, start)
            cache.commit(seq, parts[seq])
            at += n
        turn += 1


def test_instruction_sets_do_not_change_a_bit(ready: Ready) -> None:
    for name in native.isas():
        text = ready.texts[0][: ready.few_steps]
        if name == "portable":
            text = text[: SLOW_TOKENS.get(ready.name, 2)]
        with using(name):
            program = ready.on(2)
            assert same(logits(program, text), ready.expected[0]), name
            assert same(logits(program, text[: 3 if ready.few_steps else 12], 1), ready.expected[0]), name


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_gives_the_same_bits_in_pieces_and_on_every_instruction_set(ready: Ready, codec: str) -> None:
    if ready.few_steps and codec != "bf16":
        return  # attention does not know the type of the weights: smollm2 as it is has them all
    text = ready.texts[0][: 8 if ready.few_steps else 20 + 2 * CODECS[codec].tail]
    for order in native.SUM_ORDERS:
        with using(native.isa(), order):
            program = ready.on(2)
            expected = logits(program, text, codec=codec)
            assert same(logits(program, text, 3 if ready.few_steps else 6, codec=codec), expected), order
        for name in native.isas()[1:-1]:
            with using(name, order):
                assert same(logits(ready.on(2), text, 20, codec=codec), expected), (name, order)


def test_under_a_hog(ready: Ready) -> None:
    """Another busy process for every core: slower, and the same bits."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        program = ready.on(2)
        for chunk in (1, 4):
            assert same(logits(program, ready.texts[0][: 4 if ready.few_steps else 8], chunk), ready.expected[0]), chunk
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


@pytest.mark.requirement(43)
def test_the_whole_golden_text_agrees_with_llama_cpp(ready: Ready) -> None:
    """All 511 positions, and llama.cpp's greedy texts on the quantized files until it is in doubt (test_real_models
    says what can be asked). Measured, against the widened and the quantized file: qwen 100 and 99.4 %, gemma 99.4 and
    98.6, smollm2 98.9 and 99.6; in bf16 and f32 100 %, and in f32 margins within 0.0001 nats."""
    name, _, kind = ready.name.partition("-")
    program, known = ready.on(2), golden(f"{name}-f32")
    whole = dict(context=560, max_chunk=512, codec="f32")
    found = logits(program, known["tokens"], **whole)[:-1]
    second, first = np.partition(found, -2, axis=1)[:, -2:].T
    assert agreement(found.argmax(1), known) >= (0.99 if kind else 0.98)
    if kind == "f32":
        assert np.abs(first - second - np.array(known["margins"])).max() < 0.02
    if not kind:
        assert agreement(found.argmax(1), golden(name)) >= 0.98
        for text in golden(name)["greedy"]:
            prompt, answer = text["prompt_tokens"], sure_tokens(text, NOISY_LEAD)
            again = logits(program, [*prompt, *answer], codec="f32")[len(prompt) - 1 : -1]
            assert again.argmax(1).tolist() == answer, text["prompt"]


@lru_cache(maxsize=1)
def reference(path: Path) -> ReferenceProgram:
    checkpoint = open_checkpoint(path)
    return ReferenceProgram(checkpoint.config, load_weights(checkpoint), pool())


ERROR = {"smollm2": 0.05, "smollm2-bf16": 0.02, "smollm2-f32": 1e-4, "gemma": 0.1}  # of the logits, relative


def test_against_the_reference(ready: Ready) -> None:
    """8-bit activations move the logits by a few percent, bf16 ones by less, f32 ones not at all."""
    if ready.name not in ERROR:
        return  # qwen takes a minute; its kernels are gemma's
    slow = reference(ready.checkpoint.path)
    text = ready.texts[0][:40]
    expected = score(slow, cache_for(slow, Reference(), codec="f32"), text, 0, 512)
    found = logits(ready.on(2), text, codec="f32")
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < ERROR[ready.name], error


@pytest.mark.requirement(36)
@pytest.mark.parametrize(("codec", "theirs"), [("f32", 28.6589), ("f16", 28.7268)])
def test_perplexity_is_that_of_llama_cpp(codec: str, theirs: float) -> None:
    """WikiText-2, the first 20 windows of 512, second halves scored, at the same type of cache."""
    program = load_program(open_checkpoint(model("smollm2")), pool())
    cache = cache_for(program, context=512, max_chunk=512, codec=codec, strategy="contiguous")
    result = perplexity(program, cache.memory, cache.book, wikitext(), 512, 20, None, 512)
    assert result.tokens == 20 * 255
    assert math.isclose(result.ppl, theirs, abs_tol=0.05), result.ppl
