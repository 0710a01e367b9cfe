"""Names in a folder: no name leads out of it, no link is followed, and an owner sees only its own snapshots."""

import os
from pathlib import Path

import numpy as np
import pytest

from kvarn.errors import BadSnapshot, KvarnError
from kvarn.lasting import container
from kvarn.lasting.collection import Collection, NoSnapshot
from kvarn.lasting.container import Tensor

ALICE, BOB = b"\x01" * 16, b"\x02" * 16


def put(kept: Collection, owner: bytes, name: str) -> None:
    with kept.place(owner, name) as (folder, path):
        container.write(path, {"format": "x"}, {"t": (Tensor("U8", (3,)), np.zeros(3, np.uint8))}, folder)


@pytest.fixture
def kept(tmp_path: Path) -> Collection:
    return Collection(tmp_path / "snaps", 10_000)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\0b", "a\n", ".hidden", "x" * 65, "ä"])
def test_a_name_is_never_a_path(kept: Collection, name: str) -> None:
    for call in (kept.place, kept.open):
        with pytest.raises(KvarnError, match="letters, digits"), call(ALICE, name):
            pass
    with pytest.raises(KvarnError, match="letters, digits"):
        kept.remove(ALICE, name)


def test_an_owner_sees_only_its_own(kept: Collection) -> None:
    put(kept, ALICE, "one")
    put(kept, b"", "shared")
    assert [each.name for each in kept.list(ALICE)] == ["one"]
    assert kept.list(BOB) == []
    assert "format 'x'" in kept.list(ALICE)[0].problem
    for name in ("one", "shared"):
        with pytest.raises(NoSnapshot), kept.open(BOB, name):
            pass
        with pytest.raises(NoSnapshot):
            kept.remove(BOB, name)
    modes = {each.stat().st_mode & 0o777 for each in kept.folder.rglob("*")}
    assert modes == {0o700, 0o600}
    kept.remove(ALICE, "one.kvs")
    assert kept.list(ALICE) == []


def test_links_are_not_followed(kept: Collection, tmp_path: Path) -> None:
    put(kept, ALICE, "one")
    owned = kept.folder / ALICE.hex()
    (tmp_path / "secret.kvs").write_bytes(b"secret")
    (owned / "link.kvs").symlink_to(tmp_path / "secret.kvs")
    with pytest.raises(NoSnapshot), kept.open(ALICE, "link"):
        pass
    assert [each.name for each in kept.list(ALICE)] == ["one"]
    put(kept, ALICE, "link")  # replaces the link, not what it leads to
    assert (tmp_path / "secret.kvs").read_bytes() == b"secret"
    assert not (owned / "link.kvs").is_symlink()
    (kept.folder / BOB.hex()).symlink_to(owned)
    for call in (kept.place, kept.open):
        with pytest.raises(KvarnError), call(BOB, "one"):
            pass
    with pytest.raises(KvarnError):
        kept.list(BOB)
    os.mkfifo(owned / "pipe.kvs")
    with pytest.raises(NoSnapshot), kept.open(ALICE, "pipe"):
        pass


def test_a_folder_that_others_may_write_to_is_refused_and_its_size_is_limited(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(KvarnError, match="chmod 700"):
        Collection(tmp_path / "open", 10)
    (tmp_path / "file").write_text("")
    with pytest.raises(KvarnError, match="--snapshot-dir"):
        Collection(tmp_path / "file", 10)
    kept = Collection(tmp_path / "snaps", 1000)
    kept.check_room(900)
    put(kept, ALICE, "one")
    with pytest.raises(KvarnError, match="delete some"):
        kept.check_room(900)


def test_a_damaged_snapshot_is_listed_with_its_problem(kept: Collection) -> None:
    put(kept, ALICE, "one")
    file = kept.folder / ALICE.hex() / "one.kvs"
    file.write_bytes(file.read_bytes()[:-1])
    assert "cut short" in kept.list(ALICE)[0].problem
    with pytest.raises(BadSnapshot), kept.open(ALICE, "one"):
        pass
