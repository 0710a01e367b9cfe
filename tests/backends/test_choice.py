"""Which backend `auto` takes, what it says about it, and what `cuda` by name refuses."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_cuda import GIB, FakeCuda, FakeDriver, install
from support.serving import tiny_model
from support.tiny_files import write_hf

from kvarn import LLM, KvarnError
from kvarn.backends import open_backend
from kvarn.backends.choice import BESIDE, Choice, Fit, Opening, choose
from kvarn.backends.cuda import limits, probe
from kvarn.cache.plan import CacheConfig, plan
from kvarn.cache.spec import LayerSpec
from kvarn.errors import OutOfMemory
from kvarn.loading.checkpoint import open_checkpoint

SPEC = LayerSpec(8, 2, 64, 64)
CONFIG = CacheConfig([SPEC], 256)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 512)


def no_library(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


# -- the probe ---------------------------------------------------------------------------------------------------------


def test_a_device_is_described_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    device = probe.Device("NVIDIA H200", 90, "13.0", 140 * GIB, 130 * GIB)
    assert probe.probe() == probe.Probe(device)
    install(monkeypatch, FakeDriver(total=20 * GIB))
    assert probe.probe().device == replace(device, total_bytes=20 * GIB, free_bytes=20 * GIB), "a part of a device"
    install(monkeypatch, FakeDriver(nvml=1))
    assert probe.probe().device == replace(device, free_bytes=140 * GIB), "the total, where nobody knows better"


OBSTACLES = {
    "driver without device": (FakeDriver(init=100), "no NVIDIA device"),
    "no device visible": (FakeDriver(count=0), "no NVIDIA device"),
    "broken": (FakeDriver(init=803), "the NVIDIA driver does not work (cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)"),
    "nameless": (FakeDriver(init=999), "the NVIDIA driver does not work (cuInit: error 999)"),
    "forked": (FakeDriver(init=3), "this process was forked from one that uses the device: start a new process"),
    "old driver": (FakeDriver(version=11080), "the driver of NVIDIA H200 has CUDA 11.8 and 12.0 is needed: install"),
    "old device": (FakeDriver(capability=(7, 5)), "has compute capability 7.5 and kernels need 8.0 or more"),
}


@pytest.mark.parametrize(("driver", "said"), OBSTACLES.values(), ids=OBSTACLES)
def test_what_stands_in_the_way(driver: FakeDriver, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, driver)
    found = probe.probe()
    assert said in found.obstacle
    assert found.absent == (said == "no NVIDIA device")
    with pytest.raises(KvarnError, match="cannot run here") as error:
        probe.usable_device()
    assert said in str(error.value)


def test_a_library_that_is_not_there_or_not_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_open", lambda name: object())
    assert probe.probe().obstacle.startswith("the NVIDIA driver does not work (")
    monkeypatch.setattr(probe, "_open", no_library)
    monkeypatch.setattr(probe.Path, "exists", lambda path: False)
    assert probe.probe() == probe.Probe(obstacle="no NVIDIA device")
    monkeypatch.setattr(probe.Path, "exists", lambda path: str(path) == "/dev/nvidia0")
    assert "not the library of its driver, libcuda.so.1" in probe.probe().obstacle
    assert not probe.probe().absent


def test_cuda_bindings_are_wanted_only_where_there_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, bindings=False)
    assert probe.probe().obstacle == "cuda-bindings is not installed: pip install 'kvarn[cuda]'"
    code = "import sys; from kvarn.backends.cuda.probe import probe; print(probe().obstacle, 'cuda' in sys.modules)"
    without = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=without)
    assert found.stdout == "no NVIDIA device False\n"


# -- the decision ------------------------------------------------------------------------------------------------------


def test_the_decision() -> None:
    fits = Fit("NVIDIA H200", 20 * GIB, 15 * GIB)
    assert choose(None, fits) == Choice("cuda", "NVIDIA H200 is there and holds the weights")
    assert choose(None, replace(fits, weight_bytes=0)).why == "NVIDIA H200 is there"
    assert choose("no int8 cells", fits) == Choice("cpu", "no int8 cells", quiet=False)
    assert choose(None, replace(fits, free_bytes=15 * GIB + BESIDE)).name == "cuda"
    assert choose(None, replace(fits, free_bytes=15 * GIB + BESIDE - 1)) == Choice(
        "cpu", "the weights need 15.0 GiB and 2.0 GiB beside them, and NVIDIA H200 has 17.0 GiB free", quiet=False
    )


REFUSED = {
    "codec": (replace(CONFIG, codec="f16/int8"), "no f16/int8 cells (it has f32, f16, bf16, int8, int6, int4, and"),
    "panel": (replace(CONFIG, layout="panel"), "does not have the panel layout (it has token-major, head"),
    "columns": (replace(CONFIG, layout="columns"), "does not have the columns layout"),
    "unequal": (replace(CONFIG, layers=[LayerSpec(8, 2, 64, 32)]), "keys of 64 and values of 32 numbers"),
    "large": (replace(CONFIG, layers=[SPEC, LayerSpec(8, 2, 264, 264)]), "heads of 264 numbers: the cuda backend has"),
    "odd": (replace(CONFIG, layers=[LayerSpec(8, 2, 60, 60)]), "kernels for multiples of 8"),
}


@pytest.mark.parametrize(("config", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cuda_refuses_auto_gives_to_the_cpu(
    config: CacheConfig, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert said in str(limits.refusal(plan(config)))
    install(monkeypatch)
    opened = Opening("auto", 1).finish(config)
    assert opened.backend.name == "cpu"
    assert said in opened.facts["chosen"]
    assert said in caplog.text
    assert len(caplog.messages) == 1
    with pytest.raises(KvarnError, match="; use --backend cpu") as error:
        Opening("cuda", 1).finish(config)
    assert said in str(error.value)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("layout", [None, *limits.LAYOUTS])
@pytest.mark.parametrize("codec", limits.CODECS)
def test_what_cuda_takes(codec: str, layout: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    for name in ("auto", "cuda"):
        assert Opening(name, 1).finish(replace(CONFIG, codec=codec, layout=layout)).backend.name == "cuda"


def test_bytes_of_the_weights_on_a_device(tmp_path: Path) -> None:
    """Matrices of the three float types as stored, vectors in f32. Other matrices are packed or take two bytes per
    number."""
    for kind, size in (("F32", 4), ("F16", 2), ("BF16", 2)):
        checkpoint = open_checkpoint(write_hf(tmp_path / kind, "llama", dtype=kind))
        numbers = {1: 0, 2: 0}
        for info in checkpoint.infos:
            numbers[len(info.shape)] += info.nbytes // size
        assert limits.weight_bytes(checkpoint) == 4 * numbers[1] + size * numbers[2]
        for info in checkpoint.infos:
            object.__setattr__(info, "type", "Q3_K")
        assert limits.weight_bytes(checkpoint) == 4 * numbers[1] + 2 * numbers[2]
        for info in checkpoint.infos:
            object.__setattr__(info, "type", "Q4_K")
            object.__setattr__(info, "shape", (*info.shape[:-1], 4096))
        rows = sum(info.shape[0] for info in checkpoint.infos if len(info.shape) == 2)
        n_vectors = sum(len(info.shape) == 1 for info in checkpoint.infos)
        assert limits.weight_bytes(checkpoint) == 4 * 4096 * n_vectors + rows * 4096 * 5 // 8


# -- opening -----------------------------------------------------------------------------------------------------------


def test_without_a_device_auto_is_the_cpu_and_says_nothing(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(model, context=64)
    assert llm.backend.name == "cpu"
    assert llm.opened.facts == {**llm.backend.facts(), "chosen": "auto: no NVIDIA device"}
    assert not caplog.messages
    assert "chosen" not in LLM(model, context=64, backend="cpu").opened.facts
    with pytest.raises(KvarnError, match="the cuda backend cannot run here: no NVIDIA device; --backend cpu works"):
        open_backend("cuda")


def test_auto_takes_a_device_that_holds_the_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    llm = LLM(model, context=64)
    assert llm.backend.name == "cuda"
    assert llm.opened.facts["chosen"] == "auto: NVIDIA H200 is there and holds the weights"
    assert LLM(model, context=64, backend="cuda").opened.choice is None


def test_auto_says_once_why_a_device_is_not_used(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = KvarnError("no kernels for compute capability 9.0: pip install 'kvarn[cuda-build]'")
    full = FakeDriver(free=GIB)
    for driver, backend, bindings, why in (
        (None, None, False, "cuda-bindings is not installed: pip install 'kvarn[cuda]'"),
        (full, FakeCuda(free=GIB), True, "beside them, and NVIDIA H200 has 1.0 GiB free"),
        (None, kernels, True, str(kernels)),
    ):
        install(monkeypatch, driver, backend, bindings)
        caplog.clear()
        llm = LLM(model, context=64)
        assert llm.backend.name == "cpu"
        assert why in llm.opened.facts["chosen"]
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith("computing on the CPU: ")
        assert why in caplog.messages[0]
    with pytest.raises(KvarnError, match="no kernels for compute capability"):
        LLM(model, context=64, backend="cuda")
    install(monkeypatch, full, FakeCuda(free=GIB))
    with pytest.raises(OutOfMemory, match=r"has 2\.0 GiB free: use a smaller model, or --backend cpu"):
        LLM(model, context=64, backend="cuda")


def test_wrong_threads_and_names_fail_before_a_model_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    for backend, threads, said in (("auto", 0, "0 threads"), ("cuda", 5000, "5000 threads"), ("gpu9", 1, "'gpu9'")):
        with pytest.raises(KvarnError, match=said):
            LLM("/no/such/model.gguf", backend=backend, threads=threads)
