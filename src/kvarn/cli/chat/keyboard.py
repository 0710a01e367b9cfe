"""Input from a terminal: line editing, history, completion, and messages of several lines.

Enter sends. Alt-Enter, or Enter after a backslash, begins a new line. Text between triple quotes, and a paste,
may have several lines. Keys typed during an answer are read with `keep` and used by the next `read`.
Non-goal: output.
"""

import os
import sys
from collections.abc import Callable, Iterable

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style

from kvarn.cli.chat.commands import ALIASES, COMMANDS
from kvarn.cli.chat.history import FileHistory, history_file
from kvarn.cli.chat.multiline import message, next_line
from kvarn.cli.chat.settings import NAMES
from kvarn.jobs.turn import Uninterrupted

PROMPT = FormattedText([("class:sign", "> ")])
STYLE = Style.from_dict({"sign": "bold ansicyan"})
_PASTE_ON = "\x1b[?2004h"


class TerminalKeyboard:
    def __init__(self, warn: Callable[[str], None], keep_history: bool = True) -> None:
        self._warn = warn
        self._input = create_input(sys.stdin)
        output = Vt100_Output.from_pty(sys.stdout)
        output.enable_cpr = False  # a late answer of the terminal would look like typed text
        self._history: History = FileHistory(history_file()) if keep_history else InMemoryHistory()
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            prompt_continuation="  ",
            multiline=True,
            style=STYLE,
            history=self._history,
            completer=CommandCompleter(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            key_bindings=bindings(),
            enable_suspend=True,
            enable_open_in_editor=True,
            color_depth=ColorDepth.DEPTH_1_BIT if os.environ.get("NO_COLOR") else None,
            input=self._input,
            output=output,
        )

    def read(self) -> str:
        text = self._session.prompt()
        print(end=_PASTE_ON, flush=True)  # a paste during the answer is one message, too
        if isinstance(self._history, FileHistory) and (problem := self._history.take_problem()):
            self._warn(problem)
        unicode = text.encode(errors="surrogateescape").decode(errors="replace")  # what was typed may not be UTF-8
        return message(unicode)

    def keep(self) -> None:
        with Uninterrupted():  # or Ctrl-C loses the keys that were read and not yet stored
            store_typeahead(self._input, self._input.read_keys())


def bindings() -> KeyBindings:
    keys = KeyBindings()
    at_prompt = has_focus(DEFAULT_BUFFER)

    @keys.add("enter", filter=at_prompt)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        begun = next_line(buffer.text)
        if begun is None:
            buffer.validate_and_handle()
        else:
            buffer.document = Document(begun)

    @keys.add("escape", "enter", filter=at_prompt)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=at_prompt)
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


class CommandCompleter(Completer):
    """Commands, and what follows them: the name of a file or of a setting."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        typed = document.text_before_cursor
        if not typed.startswith("/") or "\n" in typed:
            return
        name, blank, argument = typed.partition(" ")
        if not blank:
            for each in (*COMMANDS, *ALIASES):
                if each.startswith(name):
                    takes = COMMANDS.get(each)
                    yield Completion(each + (" " if takes and takes.argument else ""), -len(name), display=each)
        elif name in COMMANDS and COMMANDS[name].argument == "FILE":
            yield from self._paths.get_completions(Document(argument), complete_event)
        elif name == "/set":
            yield from (Completion(f"{each} ", -len(argument), each) for each in NAMES if each.startswith(argument))
