"""Two server processes on one folder: at the same time, killed under load, and one after the other."""

from pathlib import Path

import pytest
from attack_folder import KILLED, STEADY, Scene, play, slow_model


def test_answers_of_servers_that_share_a_folder_are_those_of_a_cold_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path / "kvarn"))
    kills = 2
    found = play(Scene(slow_model(tmp_path), words=16, cache_bytes="1500K", kills=kills, seed=1), tmp_path)
    assert found.wrong == []
    assert found.streams_cut == kills, "a server was killed while it answered"
    assert found.files_before_end > 0, "the folder was written to while both servers ran"
    assert found.other_files == [], "every file has the bytes that an undisturbed server writes"
    assert found.from_disk[STEADY] + found.from_disk[KILLED] > 0
    assert found.from_disk["last"] > 0
    assert found.drops == 0, "no file was damaged"
    assert found.drafts <= kills
    assert found.exits == [0, 0, 0]
