"""The folder of the disk tier: whatever happens to its files, it gives a block's own cells or none."""

import errno
import os
import signal
import stat
from pathlib import Path

import pytest
from support.tiers import SPACE, files

from kvarn.errors import KvarnError
from kvarn.lasting.block_file import HEADER, Damaged, Name, cells_of, head_of
from kvarn.lasting.folder import Folder
from kvarn.lasting.settings import tier_settings

BLOCKS = {Name(i % 2, bytes([i]) * 16): (tuple(range(i, i + 16)), bytes([i, 255 - i]) * 100) for i in range(5)}
CALLS = ("open", "write", "close", "replace", "utime")  # of the system, while a block is written


def folder_of(path: Path, limit: int = 1 << 20, **settings) -> Folder:
    path.mkdir(exist_ok=True)
    return Folder(path, limit, SPACE, **settings)


def fill(folder: Folder, names=tuple(BLOCKS)) -> None:
    for name in names:
        folder.put(name, *BLOCKS[name])


def test_blocks_are_found_by_the_next_process_without_reading_them(tmp_path: Path, monkeypatch) -> None:
    fill(folder_of(tmp_path / "d"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", None)  # the index is made by listing
        again = folder_of(tmp_path / "d")
    assert len(again) == len(BLOCKS)
    assert again.nbytes == sum(path.stat().st_size for path in files(tmp_path / "d"))
    for name, (tokens, cells) in BLOCKS.items():
        assert again.has(name) == HEADER + 8 * 16 + 200
        assert again.get(name, tokens) == cells
    assert not again.has(Name(0, b"x" * 16))
    assert again.get(Name(0, b"x" * 16), ()) is None
    assert Folder(tmp_path / "d", 1 << 20, b"t" * 16).has(Name(0, b"\0" * 16)) == 0, "another namespace"


def test_only_the_owner_may_read_them(tmp_path: Path) -> None:
    os.umask(os.umask(0))
    settings = tier_settings(None, f"{tmp_path}/new/d:1M")
    assert (settings.folder, settings.folder_bytes) == (tmp_path / "new" / "d", 1 << 20)
    fill(Folder(tmp_path / "new" / "d", 1 << 20, SPACE))
    for path in (tmp_path / "new" / "d", *(tmp_path / "new" / "d").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(tmp_path / "new" / "d")} == {0o600}


@pytest.mark.parametrize("region", ["magic", "format", "count", "length", "key", "space", "digests", "tokens", "cells"])
def test_a_wrong_bit_anywhere_drops_the_block(tmp_path: Path, region: str) -> None:
    at = dict(magic=0, format=8, count=12, length=16, key=24, space=40, digests=56, tokens=HEADER, cells=HEADER + 128)
    starts = sorted([*at.values(), HEADER + 128 + 200])
    folder = folder_of(tmp_path / "d")
    name = next(iter(BLOCKS))
    tokens, cells = BLOCKS[name]
    for position in range(at[region], starts[starts.index(at[region]) + 1]):
        folder.put(name, tokens, cells)
        (path,) = files(tmp_path / "d")
        data = bytearray(path.read_bytes())
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        with pytest.raises(Damaged):
            folder.get(name, tokens)
        assert not path.exists()
        assert (folder.has(name), folder.nbytes) == (0, 0)


def test_cut_long_and_exchanged_files_are_dropped(tmp_path: Path) -> None:
    names = list(BLOCKS)
    tokens, cells = BLOCKS[names[0]]
    whole = head_of(SPACE, names[0].key, tokens, cells) + cells
    assert cells_of(whole, SPACE, names[0].key, tokens) == cells
    for n in range(len(whole)):
        with pytest.raises(Damaged):
            cells_of(whole[:n], SPACE, names[0].key, tokens)
    for wrong in (whole + b"\0", b"", b"\0" * len(whole)):
        with pytest.raises(Damaged):
            cells_of(wrong, SPACE, names[0].key, tokens)
    with pytest.raises(Damaged, match="other tokens"):  # two prompts with the same hash
        cells_of(whole, SPACE, names[0].key, (*tokens[:-1], 99))
    folder = folder_of(tmp_path / "d")
    fill(folder, names[:2])
    one, two = files(tmp_path / "d")
    one.rename(two)
    other = names[1] if names[1].key.hex() in two.name else names[0]
    with pytest.raises(Damaged, match="another block"):
        folder.get(other, BLOCKS[other][0])


def test_links_pipes_and_foreign_files_are_left_alone(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "d")
    names = list(BLOCKS)
    fill(folder, names[:1])
    (mine,) = files(tmp_path / "d")
    secret = tmp_path / "secret"
    secret.write_bytes(mine.read_bytes())
    mine.unlink()
    mine.symlink_to(secret)
    with pytest.raises(Damaged):
        folder.get(names[0], BLOCKS[names[0]][0])
    assert secret.exists()
    os.mkfifo(mine)
    with pytest.raises(Damaged):  # it does not wait for a writer
        folder.get(names[0], BLOCKS[names[0]][0])
    note = mine.parent / "note.txt"
    note.write_text("not a block")
    small = folder_of(tmp_path / "d", limit=1)
    fill(small, names[:3])
    assert files(tmp_path / "d") == []
    assert note.read_text() == "not a block"


def test_the_least_recently_used_go_first_also_after_a_restart(tmp_path: Path) -> None:
    ticks = iter(range(10**9, 10**12, 10**6))
    folder = folder_of(tmp_path / "d", clock=lambda: next(ticks))
    fill(folder)
    names = list(BLOCKS)
    folder.touch([names[0], names[1]])
    one = folder.has(names[0])
    small = folder_of(tmp_path / "d", limit=3 * one, clock=lambda: next(ticks))
    extra = Name(0, b"e" * 16)
    small.put(extra, *BLOCKS[names[2]])
    left = {name for name in (*names, extra) if folder_of(tmp_path / "d").has(name)}
    assert left == {extra, names[0]}, "down to 95 % of three files"
    other = Folder(tmp_path / "d", one, b"t" * 16)
    other.put(extra, *BLOCKS[names[2]])
    assert len(files(tmp_path / "d")) == 0, "all namespaces share the limit, and this one is too small for a file"


@pytest.mark.parametrize("call", ["open", "write", "close", "replace"])
@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_failed_call_leaves_no_file(tmp_path: Path, monkeypatch, call: str, fault: int) -> None:
    folder = folder_of(tmp_path / "d")
    names = list(BLOCKS)
    fill(folder, names[:1])
    real = getattr(os, call)

    def fail(*args, **kwargs):
        if call == "close":
            real(*args, **kwargs)  # the descriptor is gone in any case
        raise OSError(fault, os.strerror(fault))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(OSError, match=os.strerror(fault)):
            folder.put(names[1], *BLOCKS[names[1]])
    assert len(list((tmp_path / "d").rglob("*.*"))) == 1
    assert folder.get(names[0], BLOCKS[names[0]][0]) == BLOCKS[names[0]][1]
    fill(folder)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch) -> None:
    real = os.write
    folder = folder_of(tmp_path / "d")
    monkeypatch.setattr(os, "write", lambda file, data: real(file, bytes(data[:7])))
    fill(folder)
    for name, (tokens, cells) in BLOCKS.items():
        assert folder.get(name, tokens) == cells


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("after", [False, True])
def test_kill_9_at_any_call_loses_one_block_at_most(tmp_path: Path, call: str, after: bool) -> None:
    """A process is killed at its second and later calls of each kind, just before the call or just after it."""
    names = list(BLOCKS)
    for nth in (1, 2, 3):
        root = tmp_path / str(nth)
        child = os.fork()
        if child == 0:
            try:
                _killed_at(call, nth, after)
                fill(folder_of(root))
            finally:
                os._exit(3)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        again = folder_of(root)
        found = [name for name in names if again.has(name)]
        assert found == names[: len(found)]
        assert len(found) >= (nth - 1) // (2 if call == "write" else 1), "the block under way is lost, no other"
        for name in found:
            assert again.get(name, BLOCKS[name][0]) == BLOCKS[name][1]
        fill(again)
        assert len(folder_of(root)) == len(BLOCKS)


def _killed_at(call: str, nth: int, after: bool) -> None:
    real, count = getattr(os, call), 0

    def deadly(*args, **kwargs):
        nonlocal count
        count += 1
        if count < nth:
            return real(*args, **kwargs)
        if after:
            real(*args, **kwargs)
        return os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, call, deadly)


def test_unfinished_files_of_dead_processes_go_when_they_are_old(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "d")
    fill(folder)
    space = next((tmp_path / "d").iterdir())
    old, new = space / f".{'0' * 32}-0.kvb.0123.part", space / f".{'1' * 32}-0.kvb.0123.part"
    for each in (old, new):
        each.write_bytes(b"half")
    os.utime(old, (1, 1))
    assert len(folder_of(tmp_path / "d")) == len(BLOCKS)
    assert (old.exists(), new.exists()) == (False, True)


def test_two_processes_use_one_folder(tmp_path: Path) -> None:
    one, two = folder_of(tmp_path / "d"), folder_of(tmp_path / "d")
    names = list(BLOCKS)
    fill(one, names[:3])
    fill(two, names[2:])
    one.refresh()
    assert [bool(one.has(name)) for name in names] == [True] * 5
    two.refresh()
    one.drop(names[0])
    assert two.has(names[0]), "it has not listed again"
    assert two.get(names[0], BLOCKS[names[0]][0]) is None
    assert not two.has(names[0])
    assert two.get(names[1], BLOCKS[names[1]][0]) == BLOCKS[names[1]][1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_text(""), "File exists|Not a directory"),
        (lambda path: (path.mkdir(), path.chmod(0o777)), "chmod 700"),
        (lambda path: path.parent.joinpath("f").write_text(""), None),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, make, words: str | None) -> None:
    make(tmp_path / "d")
    with pytest.raises(KvarnError, match=words or "Not a directory") as raised:
        tier_settings(None, str(tmp_path / ("d" if words else "f/d")))
    assert "\n" not in str(raised.value)


def test_names_of_folders_and_sizes(tmp_path: Path) -> None:
    assert tier_settings(None, tmp_path / "a:1G").folder == tmp_path / "a:1G", "a Path is a folder"
    assert tier_settings(None, f"{tmp_path}/a:b").folder == tmp_path / "a:b"
    assert tier_settings(None, f"{tmp_path}/a:b:1.5K")[1:] == (tmp_path / "a:b", 1536)
    assert tier_settings(None, f"{tmp_path}/c").folder_bytes == 10 << 30
    for host, disk in ((0, None), (True, None), (None, ""), (None, 3), (None, f"{tmp_path}/c:0")):
        with pytest.raises(KvarnError, match="must"):
            tier_settings(host, disk)  # type: ignore[arg-type]
