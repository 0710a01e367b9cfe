"""The loop of `kvarn chat`: read a line; run a command, or ask the model and show its answer.

The session talks to a Keyboard and a Screen. `plain.py` has them for pipes, `keyboard.py` and `screen.py`
for terminals. Non-goal: anything that depends on which of them it is.
"""

from typing import Protocol

from kvarn.cli import prefill
from kvarn.cli.chat.commands import find, summary
from kvarn.cli.chat.conversation import Conversation, Turn
from kvarn.cli.chat.multiline import Quoted
from kvarn.errors import KvarnError

NUMBERS = ("no", "", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


class Keyboard(Protocol):
    def read(self) -> str:
        """The next command or message. EOFError: there is none. KeyboardInterrupt: the user gave up this line."""

    def keep(self) -> None:
        """Keep what has been typed until now for the next `read`."""


class Answer(Protocol):
    def add(self, piece: str) -> None: ...

    def end(self, interrupted: bool = False) -> None:
        """The answer is over. The next output begins on a line of its own."""


class Screen(Protocol):
    def say(self, text: str) -> None:
        """The result of a command."""

    def note(self, text: str) -> None:
        """A line that is not part of the answer."""

    def statistics(self, text: str) -> None:
        """A line after each answer."""

    def answer(self) -> Answer: ...


class Session:
    def __init__(self, conversation: Conversation, keyboard: Keyboard, screen: Screen) -> None:
        self.conversation = conversation
        self.keyboard = keyboard
        self.screen = screen

    def loop(self) -> None:
        gave_up = 0  # Ctrl-C at an empty line, how often in a row
        while True:
            try:
                line = self.keyboard.read()
            except EOFError:
                return
            except KeyboardInterrupt:
                gave_up += 1
                if gave_up > 1:
                    self.screen.note("Ctrl-D or /quit leaves")
                continue
            gave_up = 0
            try:
                if self._take(line) == "/quit":
                    return
            except KvarnError as error:
                self.screen.note(str(error))
            except KeyboardInterrupt:  # during a command, or before an answer was queued
                self.screen.note("stopped")

    def _take(self, line: str) -> str | None:
        """Run a command or ask the model. The name of the command."""
        if isinstance(line, Quoted) or not line.startswith("/"):
            if line.strip():
                self._turn(self.conversation.ask(line))
            return None
        if line.startswith("//"):
            self._turn(self.conversation.ask(line[1:]))
            return None
        name, command, argument = find(line)
        if name == "/regenerate":
            self._regenerate()
        elif command.run is not None:
            self.screen.say(command.run(self.conversation, argument))
        return name

    def _regenerate(self) -> None:
        turn = self.conversation.ask_again()
        if self.conversation.params.temperature == 0:
            self.screen.note("the temperature is 0, so the answer will be the same")
        self._turn(turn)

    def _turn(self, turn: Turn) -> None:
        if turn.newly_left_out:
            self.screen.note(left_out(turn.newly_left_out))
        answer, stopped, error = self.screen.answer(), False, None
        llm = self.conversation.llm
        try:
            for piece in prefill.stream(llm, turn.job):
                answer.add(piece)
                self.keyboard.keep()
        except KeyboardInterrupt:
            stopped = True
        except KvarnError as problem:
            error = problem
        finally:
            llm.runner.cancel(turn.job)
        answer.end(interrupted=stopped)
        kept = self.conversation.finish(turn)
        self.screen.statistics(summary(turn.job) + self._ending(turn, stopped))
        if error is not None:
            self.screen.note(str(error))
        if not kept:
            self.screen.note("nothing was said, so the question is not part of the conversation")

    def _ending(self, turn: Turn, stopped: bool) -> str:
        """Why the answer is not whole, if so."""
        if stopped:
            return "; stopped"
        limit = turn.job.output().completions[0].limit
        return {None: "", "context": "; stopped: the context is full", "max_tokens": "; stopped by -n"}[limit]


def left_out(n: int) -> str:
    if n == 1:
        return "the oldest turn no longer fits and was left out of the prompt"
    number = NUMBERS[n] if n < len(NUMBERS) else str(n)
    return f"the {number} oldest turns no longer fit and were left out of the prompt"
