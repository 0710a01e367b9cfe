"""A program without numbers has the sizes of the loaded one, exactly; and it refuses to run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.harness import pool
from support.tiny_gguf import CHAT, SIZES, VARIANTS, write
from support.tiny_models import GOLDEN

from kvarn import LLM, native
from kvarn.backends.cpu.paging import lost_bytes, page_bytes
from kvarn.backends.cpu.program import load_program, outline_program, packed_size
from kvarn.backends.cpu.trials import LEAST_COLD, MOST_COLD, cold_bytes
from kvarn.cache.spec import align
from kvarn.forecast.memory import most_keys, tails_of
from kvarn.loading.checkpoint import open_checkpoint
from kvarn.loading.encodings import ENCODINGS, TensorInfo
from kvarn.loading.quants import READABLE, grid_of
from kvarn.models.families import graph_of

PACKABLE = sorted(READABLE)


def tiny(folder: Path, variant: str) -> Path:
    """A model that text can be given to."""
    return write(folder / "tiny.gguf", variant, CHAT, replace(SIZES.get(variant, GOLDEN), context=512))


@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize("type", PACKABLE)
def test_an_outline_has_the_size_of_the_matrix(type: str, rows: int) -> None:
    stored = np.zeros((rows, ENCODINGS[type].row_bytes(512)), np.uint8)
    packed = native.pack(pool(), type, stored, 512, grid_of(type))
    outline = native.outline(type, rows, 512)
    assert (outline.kind, outline.nbytes, outline.rows, outline.cols) == (packed.kind, packed.nbytes, rows, 512)
    assert packed_size(TensorInfo("w", type, (rows, 512), 0, 0)) == (packed.kind, packed.nbytes)


def test_what_is_no_matrix_is_refused() -> None:
    for type, rows, columns in (("Q4_K", 1, 100), ("Q4_K", 0, 256), ("Q4_K", -1, 256), ("F32", 1, 0), ("X", 1, 1)):
        with pytest.raises(ValueError, match=r"outline|no weights of type"):
            native.outline(type, rows, columns)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_outlined_program_has_the_sizes_of_the_loaded_one(tmp_path: Path, variant: str) -> None:
    checkpoint = open_checkpoint(tiny(tmp_path, variant))
    graph = graph_of(checkpoint.config, checkpoint.shapes)
    loaded, outlined = (make(checkpoint, graph, pool()) for make in (load_program, outline_program))
    assert outlined.nbytes == loaded.nbytes
    assert outlined.workspace_for(33, 2, 40) == loaded.workspace_for(33, 2, 40)
    with pytest.raises(ValueError, match="only for sizes"):
        outlined._program.run(native.CacheView(), *(np.zeros(1, t) for t in (np.int64, np.int32, np.int64)), _logits())


def _logits() -> np.ndarray:
    return np.zeros((1, 16), np.float32)


@pytest.mark.parametrize("variant", ["llama", "gemma3"])
@pytest.mark.parametrize("tokens", [16, 33])
@pytest.mark.parametrize("cells", ["bf16", "bf16/int4", "int8", "int6"])
def test_the_workspace_after_the_largest_steps(tmp_path: Path, variant: str, tokens: int, cells: str) -> None:
    path = tiny(tmp_path, variant)
    sizes = dict(context=300, max_seqs=2, max_batch_tokens=tokens)
    with LLM(path, **sizes, threads=2, backend="cpu", cache="paged", cache_type=cells) as llm:
        plan = llm.cache.plan
        forecast = llm.program.workspace_for(tokens, 2, most_keys(plan), plan.codec.v.block, tails_of(plan))
        assert llm.program.workspace < forecast
        llm.generate([[1] * tokens], max_tokens=1, ignore_eos=True)
        llm.generate([[2], [3]], max_tokens=299, ignore_eos=True)  # side by side, to the end of the context
        assert llm.program.workspace == forecast


def test_what_large_pages_lose() -> None:
    page, shared = page_bytes(), native.SHARED_PAGES
    assert lost_bytes([]) == 0
    assert lost_bytes([page]) == 0
    assert lost_bytes([native.ALONE + 1]) == align(native.ALONE + 1, page) - native.ALONE - 1
    assert lost_bytes([1, 1]) == page - 2, "small ones share a mapping, each at a cache line"
    small = native.ALONE - 64
    n = shared // small
    assert lost_bytes([small] * n) == align(n * small, page) - n * small
    assert lost_bytes([small] * (n + 1)) == align(n * small, page) + align(small, page) - (n + 1) * small


@pytest.mark.parametrize("type", PACKABLE)
def test_zeros_are_a_matrix_of_zeros(type: str) -> None:
    zeros, numbers = native.zeros(type, 20, 256), np.ones((20, 256), np.float32)
    assert zeros.nbytes == native.outline(type, 20, 256).nbytes
    zeros.unpack(numbers)
    assert np.isfinite(numbers).all()
    assert not numbers.any(), "the scales are 0"


def test_outlines_have_no_numbers() -> None:
    with pytest.raises(ValueError, match="the weight has no numbers, only sizes"):
        native.outline("F32", 16, 32).unpack(np.zeros((16, 32), np.float32))


def test_cold_memory_is_larger_than_caches(tmp_path: Path) -> None:
    assert cold_bytes(tmp_path) == LEAST_COLD
    for name, size in (("index0", "32K"), ("index3", "32768K"), ("index4", "none")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(f"{size}\n")
    assert cold_bytes(tmp_path) == 128 << 20
    (tmp_path / "index3" / "size").write_text("1048576K\n")
    assert cold_bytes(tmp_path) == MOST_COLD
