"""Files from anywhere: every changed bit, cut and hostile header is refused in one line, in little memory."""

import json
import os
import pickle
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from kvarn.errors import BadSnapshot
from kvarn.lasting import container
from kvarn.lasting.container import Container, Tensor
from kvarn.lasting.whole_file import PART, sweep, write_whole


def small(path: Path) -> Path:
    data = np.arange(48, dtype=np.uint8)
    tensors = {"tokens": (Tensor("U32", (4,)), data[:16]), "k.0": (Tensor("BF16", (4, 2, 2)), data[16:])}
    container.write(path, {"format": "test", "model": 'a "name"'}, tensors)
    return path


def check(path: Path) -> None:
    with Container(path) as file:
        for name in file.tensors:
            file.check(name)


def refused(path: Path) -> str:
    with pytest.raises(BadSnapshot) as error:
        check(path)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 700
    return message


def test_other_programs_read_it(tmp_path: Path) -> None:
    with safe_open(small(tmp_path / "a.kvs"), "numpy") as file:
        assert file.metadata()["format"] == "test"
        assert file.get_tensor("tokens").tolist() == np.arange(16, dtype=np.uint8).view(np.uint32).tolist()
        assert file.get_slice("k.0").get_shape() == [4, 2, 2]
    assert (tmp_path / "a.kvs").stat().st_mode & 0o777 == 0o600


def test_every_changed_bit_and_every_cut_is_refused(tmp_path: Path) -> None:
    raw, path = small(tmp_path / "a.kvs").read_bytes(), tmp_path / "b.kvs"
    for at in range(len(raw)):
        for bit in range(8) if at < 8 else (at % 8,):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :])
            refused(path)
    for length in (*range(0, len(raw), 7), len(raw) - 1):
        path.write_bytes(raw[:length])
        refused(path)
    path.write_bytes(raw + b"\0")
    assert "too long" in refused(path)


ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
HOSTILE = {
    "no header": b"",
    "a header of 2^63 bytes": (1 << 63).to_bytes(8, "little") + b"{}      ",
    "a header larger than the limit": (1 << 30).to_bytes(8, "little") + b" " * 100,
    "not JSON": b"nonsense" * 4,
    "a list": b"[1,2,3]" + b" " * 9,
    "deep": b"[" * 100_000,
    "a huge shape": {"t": {**ENTRY, "shape": [1 << 62, 1 << 62]}},
    "a negative shape": {"t": {**ENTRY, "shape": [-4]}},
    "a length that is no number": b'{"__metadata__":{},"t":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}',
    "a fraction": {"t": {**ENTRY, "shape": [4.0]}},
    "true": {"t": {**ENTRY, "shape": [True]}},
    "an unknown type": {"t": {**ENTRY, "dtype": "F999"}},
    "a type that is a list": {"t": {**ENTRY, "dtype": []}},
    "overlapping tensors": {"t": ENTRY, "u": {**ENTRY, "data_offsets": [0, 4]}},
    "a tensor past the end": {"t": {**ENTRY, "data_offsets": [1 << 40, (1 << 40) + 4]}},
    "metadata that is no text": {"__metadata__": {"format": 3}},
    "metadata that is a list": {"__metadata__": []},
    "an entry that is no object": {"t": 7},
    "twice the same name": b'{"__metadata__":{"digest":"","digests":"{}"},"t":{},"t":{}}',
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused_in_little_memory(case: str, tmp_path: Path) -> None:
    header, path = HOSTILE[case], tmp_path / "a.kvs"
    if isinstance(header, dict):
        texts = {"digest": "0" * 64, "digests": json.dumps(dict.fromkeys(header, "0" * 64))}
        header = json.dumps({"__metadata__": texts, **header}).encode()
    raw = header if case in ("no header", "not JSON") or len(header) < 40 else None
    path.write_bytes(raw if raw is not None else len(header).to_bytes(8, "little") + header + bytes(8))
    tracemalloc.start()
    refused(path)
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()


def test_pickles_folders_pipes_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.kvs").write_bytes(pickle.dumps({"tokens": [1, 2, 3] * 10}))
    assert "no snapshot" in refused(tmp_path / "p.kvs")
    assert "not a file" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in refused(tmp_path / "pipe")
    assert "No such file" in refused(tmp_path / "missing")
    (tmp_path / "link.kvs").symlink_to(small(tmp_path / "a.kvs"))
    with pytest.raises(BadSnapshot):
        Container(tmp_path / "link.kvs", follow=False)
    Container(tmp_path / "link.kvs").close()


# -- writing -----------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from kvarn.lasting.whole_file import write_whole
name, when = sys.argv[1], int(sys.argv[2])
calls = 0
def counted(call):
    def counting(*given, **named):
        global calls
        calls += 1
        if calls == when:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*given, **named)
    return counting
for each in ("open", "write", "fsync", "close", "replace"):
    setattr(os, each, counted(getattr(os, each)))
write_whole(Path(name), [b"new" * 1000, b"end"])
"""


def test_killed_at_any_call_a_name_has_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path, seen = tmp_path / "a.kvs", set()
    for when in range(1, 12):
        path.write_bytes(b"old")
        ran = subprocess.run([sys.executable, "-c", KILLED, str(path), str(when)], check=False)
        found = path.read_bytes()
        assert found in (b"old", b"new" * 1000 + b"end")
        seen.add((ran.returncode, found == b"old"))
        if ran.returncode == 0:
            break
    assert {(-signal.SIGKILL, True), (-signal.SIGKILL, False), (0, False)} == seen
    assert [each.name for each in tmp_path.iterdir() if each.name.endswith(PART)]
    for each in tmp_path.iterdir():
        os.utime(each, (1, 1))
    sweep(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["a.kvs"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.kvs"
    path.write_bytes(b"old")

    def pieces():
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_whole(path, pieces())
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"old"]
