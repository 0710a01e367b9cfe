"""`kvarn chat --session FILE`: a conversation that goes on tomorrow, with its messages, settings and cells.

The file is a snapshot (lasting/snapshot.py) with the conversation in it. It is read at the start and written at the
end, also when the terminal is closed. If its cells cannot be used (another model, another cache type), the messages
are, and the next answer computes them. A file that is damaged, or no snapshot, is refused and never replaced.
"""

import signal
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

from kvarn.cli.chat import saved, settings
from kvarn.cli.chat.conversation import ID, Conversation
from kvarn.engine.params import UNBOUNDED, SamplingParams
from kvarn.errors import BadSnapshot, KvarnError
from kvarn.lasting.snapshot import SnapshotFile
from kvarn.loading.paths import user_path
from kvarn.words import counted, file_size

_ENDS = ("SIGHUP", "SIGTERM")  # the terminal was closed; the system stops


class NoSession:
    """A chat without --session."""

    def resume(self, conversation: Conversation, given: SamplingParams) -> str:
        return ""

    def keep(self, conversation: Conversation) -> str:
        return ""


class SessionFile:
    def __init__(self, name: str) -> None:
        self._path = user_path(name)
        if not self._path.parent.is_dir():
            raise KvarnError(f"--session {name}: there is no folder {self._path.parent}")
        for each in _ENDS:
            if number := getattr(signal, each, None):
                signal.signal(number, _leave)

    def resume(self, conversation: Conversation, given: SamplingParams) -> str:
        """Go on with the conversation of the file, if there is one, and say what was found. `given` settings win."""
        if not self._path.exists():
            return f"a new session: it will be kept in {self._path}"
        with SnapshotFile(self._path) as file:
            file.check()
            messages, params, left_out = _read(file, given)
        system = conversation.system
        conversation.restore(messages)
        conversation.system = system or conversation.system
        conversation.params, conversation.left_out = params, left_out
        turns = counted(conversation.n_turns, "turn")
        try:
            found = conversation.llm.snapshots.load(self._path, conversation=ID)
        except KvarnError as error:
            return f"{turns} from {self._path}; they are computed again: {error}"
        return f"{turns} from {self._path}: {counted(len(found.tokens), 'token')} read in {found.seconds:.2f} s"

    def keep(self, conversation: Conversation) -> str:
        """Write the conversation, and say so."""
        if not conversation.n_turns:
            return f"there is no conversation to keep; {self._path} stays as it was" if self._path.exists() else ""
        if self._path.exists():
            with SnapshotFile(self._path):  # refuses to replace another file
                pass
        llm, last = conversation.llm, conversation.last
        tokens = llm.render(conversation.messages) if last is None else last.request.samples[0].tokens
        facts = llm.snapshots.save(self._path, tokens, chat=_chat(conversation), conversation=ID)
        kept = f"{counted(conversation.n_turns, 'turn')}, {counted(facts.n_tokens, 'token')}"
        return f"kept {kept} in {self._path} ({file_size(facts.nbytes)})"


def _chat(conversation: Conversation) -> dict[str, Any]:
    kept = {name: getattr(conversation.params, name) for name in settings.NAMES}
    return {"messages": conversation.messages, "settings": kept, "left_out": conversation.left_out}


def _read(file: SnapshotFile, given: SamplingParams) -> tuple[list[saved.Message], SamplingParams, int]:
    chat = file.chat()
    if not isinstance(chat, dict):
        raise BadSnapshot(f"{file.name} has no conversation: use it with --snapshot, or choose another name")
    messages = saved.checked(chat.get("messages"), file.name)
    kept, left_out = chat.get("settings"), chat.get("left_out")
    if not isinstance(kept, dict) or not set(kept) <= set(settings.NAMES) or type(left_out) is not int or left_out < 0:
        raise BadSnapshot(f"{file.name}: its settings are not those of a conversation")
    usual = SamplingParams(max_tokens=UNBOUNDED)  # what the options are if they are not given
    chosen = {name: value for name in kept if (value := getattr(given, name)) != getattr(usual, name)}
    return messages, replace(given, **{**kept, **chosen}), left_out


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def open_session(name: str | None) -> "SessionFile | NoSession":
    return NoSession() if name is None else SessionFile(name)
