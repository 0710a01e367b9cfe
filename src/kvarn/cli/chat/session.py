"""The loop of `kvarn chat`: read a line; run a command, or ask the model and show its answer.

The session talks to a Keyboard and a Screen. `plain.py` has them for pipes, `keyboard.py` and `screen.py`
for terminals. Non-goal: anything that depends on which of them it is.
"""

from typing import Protocol

from kvarn.chats.answer import content_of
from kvarn.cli import prefill
from kvarn.cli.chat.commands import find
from kvarn.cli.chat.conversation import Conversation, Turn
from kvarn.cli.chat.multiline import Quoted
from kvarn.cli.ending import WHOLE, ending, summary
from kvarn.dialect import Reasoning
from kvarn.errors import KvarnError
from kvarn.jobs.job import Job
from kvarn.jobs.turn import Uninterrupted

NUMBERS = ("no", "", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


class Keyboard(Protocol):
    def read(self) -> str:
        """The next command or message. EOFError: there is none. KeyboardInterrupt: the user gave up this line."""

    def keep(self) -> None:
        """Keep what has been typed until now for the next `read`."""


class Answer(Protocol):
    def wait(self) -> None:
        """The prompt is being read; called from time to time, on another thread."""

    def think(self, piece: str) -> None:
        """Reasoning, which is not part of the answer's text."""

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

    def answer(self, job: Job | None = None) -> Answer:
        """`job`: computes it."""


class Session:
    def __init__(self, conversation: Conversation, keyboard: Keyboard, screen: Screen) -> None:
        self.conversation = conversation
        self.keyboard = keyboard
        self.screen = screen
        self.failed = False  # whether a line was refused

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
                self.failed = True
                self.screen.note(str(error))
            except KeyboardInterrupt:  # during a command, or before an answer was queued
                self.screen.note("stopped")

    def _take(self, line: str) -> str | None:
        """Run a command or ask the model. The name of the command."""
        if isinstance(line, Quoted) or not line.startswith("/"):
            if line.strip():
                self._ask(line)
            return None
        if line.startswith("//"):
            self._ask(line[1:])
            return None
        name, command, argument = find(line)
        if name == "/regenerate":
            self._regenerate()
        elif command.run is not None:
            self.screen.say(command.run(self.conversation, argument))
        return name

    def _ask(self, text: str) -> None:
        replaces = self.conversation.waits
        turn = self.conversation.ask(text)
        if replaces:
            self.screen.note("this message replaces the question that has no answer")
        self._turn(turn)

    def _regenerate(self) -> None:
        turn = self.conversation.ask_again()
        if self.conversation.repeats(turn):
            self.screen.note("the temperature is 0, so the answer will be the same")
        self._turn(turn)

    def _turn(self, turn: Turn) -> None:
        if turn.newly_left_out > 0:
            self.screen.note(left_out(turn.newly_left_out))
        answer, llm = self.screen.answer(turn.job), self.conversation.llm
        try:
            stopped, error = self._show(turn, answer)
        finally:
            with Uninterrupted():  # a further Ctrl-C must not lose what was said
                llm.runner.cancel(turn.job)
                said = self.conversation.finish(turn)
        answer.end(interrupted=stopped)
        if said and not turn.job.output().text:
            self.screen.note("(empty answer)")
        why = ending(llm, turn.job)
        self.screen.statistics(summary(turn.job) + ("" if why == WHOLE else f"; {why}"))
        if error is not None:
            self.failed = True
            self.screen.note(str(error))
        if not said:
            waits = self.conversation.waits
            self.screen.note("the question stays; /regenerate answers it" if waits else "the earlier answer stays")

    def _show(self, turn: Turn, answer: Answer) -> tuple[bool, KvarnError | None]:
        """Show the answer as it is computed. Whether Ctrl-C stopped it, and what went wrong."""
        try:
            for part in prefill.stream(self.conversation.llm, turn.job, answer.wait):
                if isinstance(part, Reasoning):
                    answer.think(part.text)
                elif text := content_of(part):
                    answer.add(text)
                self.keyboard.keep()
        except KeyboardInterrupt:
            return True, None
        except KvarnError as problem:
            return False, problem
        return False, None


def left_out(n: int) -> str:
    if n == 1:
        return "the oldest turn no longer fits and was left out of the prompt"
    number = NUMBERS[n] if n < len(NUMBERS) else str(n)
    return f"the {number} oldest turns no longer fit and were left out of the prompt"
