"""Binaries of kernels on disk: their names, their folders, damage, and what happens when they are not there."""

import dataclasses
import logging
import shutil
from pathlib import Path

import pytest
from gpu.support.demo import DEMOS, PRODUCT, SCALE

from kvarn.backends.cuda import store, workers
from kvarn.backends.cuda.store import Binary, Store, digest, file_name, read, write
from kvarn.errors import KvarnError
from kvarn.loading.progress import quiet

BINARY = Binary(b"\x7fELF\n\n\0code", "demo", 4096, 8)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return shutil.copytree(DEMOS, tmp_path / "sources")


@pytest.fixture
def folders(tmp_path: Path, sources: Path) -> Store:
    return Store(tmp_path / "package", tmp_path / "cache", sources)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list:
    """Compiles nothing; the list has what it was asked for."""
    asked = []

    def compile_all(tasks, sources):
        for kernel, target in tasks:
            asked.append((kernel, target))
            yield kernel, target, Binary(f"{kernel.title} {target}".encode(), kernel.name, 0, 4)

    monkeypatch.setattr(workers, "compile_all", compile_all)
    return asked


def put(folder: Path, sources: Path, code: bytes, target: int = 90) -> Path:
    path = folder / file_name(SCALE, target, sources)
    write(path, dataclasses.replace(BINARY, code=code))
    return path


# Digests


def test_a_digest_covers_every_field_and_the_target() -> None:
    other = {
        "name": "demo_product",
        "arguments": (*SCALE.arguments, ("more", "i32")),
        "constants": (("BLOCK", 32),),
        "aligned": (("stride", 16),),
        "warps": 8,
        "stages": 2,
    }
    assert set(other) == {field.name for field in dataclasses.fields(SCALE)}
    changed = [dataclasses.replace(SCALE, **{name: value}) for name, value in other.items()]
    digests = [digest(kernel, 90, DEMOS) for kernel in (SCALE, *changed)] + [digest(SCALE, 100, DEMOS)]
    assert len(set(digests)) == len(other) + 2
    assert digest(SCALE, 90, DEMOS) == digests[0]


@pytest.mark.parametrize("name", ["TRITON", "OPTIONS", "POINTER_ALIGNMENT"])
def test_a_digest_covers_the_compiler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(SCALE, 90, DEMOS)
    monkeypatch.setattr(store, name, {"other": 1})
    assert digest(SCALE, 90, DEMOS) != before


@pytest.mark.parametrize(("file", "counts"), [("demo_scale", True), ("demo_one", True), ("demo_product", False)])
def test_a_digest_covers_the_source_and_what_it_imports(sources: Path, file: str, counts: bool) -> None:
    before = digest(SCALE, 90, sources)
    with (sources / f"{file}.py").open("a") as out:
        out.write("# more\n")
    assert (digest(SCALE, 90, sources) != before) == counts


@pytest.mark.parametrize(
    "line", ["from kvarn.backends.cuda.kernels import demo_one", "import kvarn.backends.cuda.kernels.demo_one"]
)
def test_every_kind_of_import_counts(sources: Path, line: str) -> None:
    (sources / "demo_scale.py").write_text(line)
    before = digest(SCALE, 90, sources)
    (sources / "demo_one.py").write_text("")
    assert digest(SCALE, 90, sources) != before


def test_line_ends_do_not_count(sources: Path) -> None:
    before = digest(SCALE, 90, sources)
    for path in sources.glob("*.py"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert digest(SCALE, 90, sources) == before


@pytest.mark.parametrize("line", ["from kvarn.backends.cuda.specs import SPLIT", "from . import demo_one"])
def test_an_import_that_no_digest_covers_is_an_error(sources: Path, line: str) -> None:
    (sources / "demo_one.py").write_text(line)
    with pytest.raises(AssertionError, match=r"kernels/demo_one\.py imports .*, which no digest covers"):
        digest(SCALE, 90, sources)


# Files


def test_a_binary_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "sm_90" / "x.kernel"
    write(path, BINARY)
    assert read(path) == BINARY
    assert list(path.parent.iterdir()) == [path]


def test_a_damaged_file_counts_as_absent(tmp_path: Path) -> None:
    path = tmp_path / "x.kernel"
    assert read(path) is None
    write(path, BINARY)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read(path) is None, length
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert read(path) is None, place


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.kernel"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        write(path, BINARY)
    assert list(tmp_path.iterdir()) == [path]


# Lookup


def test_the_package_comes_first_then_the_cache_then_the_compiler(folders: Store, compiler: list) -> None:
    packaged = put(folders.packaged, folders.sources, b"package")
    cached = put(folders.cache, folders.sources, b"cache")
    found = []
    for gone in (packaged, cached, None):
        fresh = Store(folders.packaged, folders.cache, folders.sources)
        found.append((fresh.find([SCALE], 90, quiet)[SCALE].code, fresh.summary))
        if gone:
            gone.unlink()
    compiled = f"{SCALE.title} 90".encode()
    assert found == [(b"package", "1 from the package"), (b"cache", "1 from the cache"), (compiled, "1 compiled")]
    assert compiler == [(SCALE, 90)]


def test_what_was_compiled_is_stored_and_kept(folders: Store, compiler: list) -> None:
    seen = []
    kernels = [SCALE, PRODUCT["bf16"], PRODUCT["fp16"], SCALE]
    put(folders.packaged, folders.sources, b"package")
    first = folders.find(kernels, 90, lambda *facts: seen.append(facts))
    assert list(first) == kernels[:3]
    assert seen == [("compiling kernels", done, 2) for done in range(3)]
    assert folders.find(kernels, 90, quiet) == first
    assert folders.summary == "1 from the package, 2 compiled"
    again = Store(folders.packaged, folders.cache, folders.sources)
    assert again.find(kernels, 90, quiet) == first
    assert again.summary == "1 from the package, 2 from the cache"
    assert len(compiler) == 2


def test_a_stale_or_damaged_binary_is_not_loaded(folders: Store, compiler: list) -> None:
    put(folders.packaged, folders.sources, b"other target", 80)
    put(folders.packaged, folders.sources, b"old")
    (folders.sources / "demo_one.py").write_text("# new\n")
    put(folders.cache, folders.sources, b"damaged").write_bytes(b"damaged")
    assert folders.find([SCALE], 90, quiet)[SCALE].code == f"{SCALE.title} 90".encode()
    assert read(folders.cache / file_name(SCALE, 90, folders.sources)) is not None, "replaced"


def test_without_a_place_to_store_it_still_runs(
    tmp_path: Path, sources: Path, compiler: list, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    folders = Store(tmp_path / "package", tmp_path / "file" / "cache", sources)
    with caplog.at_level(logging.WARNING, "kvarn"):
        assert len(folders.find([SCALE, *PRODUCT.values()], 90, quiet)) == 4
        assert len(folders.find([SCALE, *PRODUCT.values()], 90, quiet)) == 4
    (record,) = caplog.records
    assert record.getMessage().endswith("(Not a directory): set KVARN_CACHE")
    assert len(compiler) == 4


@pytest.mark.parametrize(
    ("version", "words"),
    [(None, "which does it, is not installed: pip install"), ("3.6.0", "is needed (Triton 3.6.0 is installed): pip")],
)
def test_without_triton_the_error_says_what_to_do(
    folders: Store, monkeypatch: pytest.MonkeyPatch, version: str | None, words: str
) -> None:
    monkeypatch.setattr(store, "triton_version", lambda: version)
    with pytest.raises(KvarnError) as caught:
        folders.find([SCALE, *PRODUCT.values()], 90, quiet)
    message = str(caught.value)
    assert message.startswith("4 kernels for sm_90 must be compiled, and Triton 3.9.0, ")
    assert words in message
    assert message.endswith("install 'kvarn[cuda-build]', or run make kernels in a checkout of kvarn")
    assert "\n" not in message


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path))
    assert Store().cache == tmp_path / "kernels"
