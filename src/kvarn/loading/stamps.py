"""Remembers which files were checked, so that a large file is hashed once and not at every start.

A stamp is a small JSON file: for each file its SHA-256 (empty if none is known), its size and the time of
its last change. If the size or the time is another, the file counts as unchecked. A stamp that cannot be
written costs one more hash and nothing else.
Non-goals: computing digests (digest.py); protection from somebody who can write to these folders.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from tempfile import mkstemp

from kvarn.loading.paths import cache_folder

_MOST_BYTES = 1 << 20
TEMPORARY = ".stamp-"  # how the names of unfinished stamps begin


def beside(path: Path) -> Path:
    """The stamp of a file in kvarn's own folder."""
    return path.with_name(path.name + ".sha256")


def of_hub(path: Path) -> Path:
    """The stamp of a file or folder in the cache of the Hugging Face library, to which kvarn adds no files."""
    return cache_folder() / "checked" / sha256(os.path.abspath(path).encode("utf-8", "surrogateescape")).hexdigest()


def read(stamp: Path, folder: Path) -> dict[str, str] | None:
    """The SHA-256 of each file in `folder` that was checked; None if there is no stamp, or if a file has changed."""
    try:
        if stamp.stat().st_size > _MOST_BYTES:
            return None
        facts = json.loads(stamp.read_bytes())
        same = all(rest == [*_facts(folder / file)] for file, (_, *rest) in facts.items())
        return {file: str(entry[0]) for file, entry in facts.items()} if same and facts else None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def write(stamp: Path, folder: Path, digests: Mapping[str, str]) -> None:
    with suppress(OSError):
        text = json.dumps({file: [digest, *_facts(folder / file)] for file, digest in digests.items()})
        stamp.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = mkstemp(prefix=TEMPORARY, dir=stamp.parent)  # a new file, never one that is there
        try:
            with open(handle, "w", encoding="utf-8") as out:
                out.write(text)
            os.replace(temporary, stamp)
        except BaseException:
            os.unlink(temporary)
            raise


def _facts(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns
