"""Stamps of weights go to a folder of the test, never to the user's."""

from pathlib import Path

import pytest

from kvarn.lasting import weights


@pytest.fixture(autouse=True)
def stamps(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("stamps")
    monkeypatch.setattr(weights, "cache_folder", lambda: folder)
    return folder
