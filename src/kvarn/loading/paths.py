"""The paths that users type.

Non-goal: whether anything is there.
"""

import os
from pathlib import Path

from kvarn.errors import KvarnError, printable


def user_path(text: str) -> Path:
    """The path with `~` and `~user` replaced by the folder. Raises KvarnError if no file can have this path."""
    if "\0" in text:
        raise KvarnError(f"{printable(text, 80)} cannot be a path: it has a NUL character; remove it")
    expanded = os.path.expanduser(text)
    if text.startswith("~") and expanded == text:  # no such user, or this user has no home folder
        home = printable(text.split("/")[0], 80)
        raise KvarnError(f"there is no home folder {home}; check it, or write ./~ for a file whose name begins so")
    return Path(expanded)
