"""Conversations in files: a JSON list of {"role": ..., "content": ...}, as the HTTP API takes in `messages`. Answers
may have `reasoning_content`.

`load` checks everything and says in one line what is wrong. `save` replaces the file in one step, and only
if that file is a saved conversation, too. Non-goal: what a chat template accepts.
"""

import json
import os
from pathlib import Path
from tempfile import mkstemp
from typing import Any

from kvarn.errors import KvarnError
from kvarn.loading.paths import user_path

Message = dict[str, str]
ROLES = ("system", "user", "assistant")
LARGEST = 64 << 20  # bytes of a file


def load(name: str) -> list[Message]:
    path = user_path(name)
    try:
        if not path.is_file():
            raise KvarnError(f"{name}: {'this is not a file' if path.exists() else 'no such file'}")
        if path.stat().st_size > LARGEST:
            raise KvarnError(f"{name}: the file has more than {LARGEST >> 20} MiB: this is no saved conversation")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KvarnError(f"{name}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise KvarnError(f"{name}: this is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise KvarnError(f"{name}: this is not JSON (line {error.lineno}: {error.msg})") from None
    except (RecursionError, ValueError) as error:
        if isinstance(error, KvarnError):
            raise
        raise KvarnError(f"{name}: this JSON is nested too deeply, or a number in it is too long") from None
    return checked(value, name)


def checked(value: Any, name: str) -> list[Message]:
    """The value as messages, or an error that names the first message that is wrong."""
    if not isinstance(value, list) or not value:
        raise KvarnError(f'{name}: this must be a list of messages: [{{"role": "user", "content": "Hello"}}]')
    for i, message in enumerate(value):
        problem = _problem(message, i)
        if problem:
            raise KvarnError(f"{name}: message {i + 1} {problem}")
    return value


def _problem(message: Any, i: int) -> str:
    if not isinstance(message, dict):
        return 'is not an object with "role" and "content"'
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            return f'has no "{key}"' if key not in message else f'has a "{key}" that is not a string'
    known = {"role", "content", "reasoning_content"} if message["role"] == "assistant" else {"role", "content"}
    extra = sorted(message.keys() - known)
    if extra:
        return f'has "{extra[0]}": only "role" and "content" are known here'
    if not isinstance(message.get("reasoning_content", ""), str):
        return 'has a "reasoning_content" that is not a string'
    if message["role"] not in ROLES:
        return f'has the role "{message["role"]}"; it must be one of {", ".join(ROLES)}'
    if message["role"] == "system" and i:
        return "is a system message; only the first message can be one"
    return "has text that is not Unicode" if any(map(_has_surrogates, message.values())) else ""


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def save(name: str, messages: list[Message]) -> None:
    path = user_path(name)
    fresh = None
    try:
        path = path.resolve()  # a link stays a link
        if path.exists():
            _check_replaceable(name, path)
        file, fresh = mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)  # only the owner can read it
        with os.fdopen(file, "w", encoding="utf-8") as writer:
            writer.write(json.dumps(messages, ensure_ascii=False, indent=1) + "\n")
        os.replace(fresh, path)
        fresh = None
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other
        raise KvarnError(f"{name}: {getattr(error, 'strerror', None) or error}") from None
    finally:
        if fresh is not None:
            os.unlink(fresh)


def _check_replaceable(name: str, path: Path) -> None:
    try:
        load(str(path))
    except KvarnError:
        raise KvarnError(f"{name} exists and is no saved conversation: choose another name") from None
