"""The huggingface_hub library without a network: it puts files into a cache folder as the real one does.

tests/loading/test_hub.py has the real library.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvarn.loading import hub


class StubHub:
    """One repository, o/r. `arrives` is what a download of a file gives instead of its content."""

    def __init__(self, cache: Path, files: dict[str, bytes]) -> None:
        self.cache, self.files = cache, files
        self.arrives: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.online = True
        quiet = SimpleNamespace(get_verbosity=lambda: 0, set_verbosity=lambda n: None, set_verbosity_error=lambda: None)
        self.logging = quiet

    @property
    def root(self) -> Path:
        return self.cache / "models--o--r"

    @property
    def snapshot(self) -> Path:
        return self.root / "snapshots" / "c"

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "StubHub":
        monkeypatch.setattr(hub, "library", lambda name: self)
        monkeypatch.setattr(hub, "reason", str)
        monkeypatch.setattr(hub, "snapshot_of", lambda repo: self.snapshot if self.snapshot.is_dir() else None)
        return self

    def HfApi(self) -> "StubHub":
        return self

    def model_info(self, repo: str, files_metadata: bool) -> Any:
        self.asked.append(repo)
        if not self.online:
            raise ConnectionError("no network")
        siblings = [
            SimpleNamespace(rfilename=file, size=len(content), lfs={"sha256": sha256(content).hexdigest()})
            for file, content in self.files.items()
        ]
        return SimpleNamespace(siblings=siblings, card_data=None, tags=[])

    def hf_hub_download(self, repo: str, file: str) -> str:
        self.asked.append(file)
        path = self.snapshot / file
        if not path.exists():
            blob = self.root / "blobs" / sha256(self.files[file]).hexdigest()
            blob.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            (self.root / "refs").mkdir(exist_ok=True)
            (self.root / "refs" / "main").write_text("c")
            blob.write_bytes(self.arrives.get(file, self.files[file]))
            path.symlink_to(blob)
        return str(path)

    def snapshot_download(self, repo: str, allow_patterns: Sequence[str]) -> str:
        for file in self.files:
            if any(fnmatchcase(file, pattern) for pattern in allow_patterns):
                self.hf_hub_download(repo, file)
        return str(self.snapshot)
