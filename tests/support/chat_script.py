"""A chat without a terminal: lines that are typed, and what the screen was told."""

from kvarn import LLM, SamplingParams
from kvarn.cli.chat.conversation import Conversation
from kvarn.cli.chat.session import Session


class Script:
    """A keyboard that types these lines, and a screen that remembers what it was told."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self.lines = list(lines)
        self.said: list[str] = []
        self.notes: list[str] = []
        self.costs: list[str] = []
        self.pieces: list[str] = []
        self.thoughts: list[str] = []
        self.interrupt_after: int | None = None

    def read(self) -> str:
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    def keep(self) -> None:
        if self.interrupt_after is not None and len(self.pieces) >= self.interrupt_after:
            raise KeyboardInterrupt

    def say(self, text: str) -> None:
        self.said.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def statistics(self, text: str) -> None:
        self.costs.append(text)

    def answer(self, job: object = None) -> "Script":
        return self

    def wait(self) -> None: ...

    def think(self, piece: str) -> None:
        self.thoughts.append(piece)

    def add(self, piece: str) -> None:
        self.pieces.append(piece)

    def end(self, interrupted: bool = False) -> None:
        pass


def chat(
    llm: LLM,
    *lines: str | type[BaseException],
    system: str | None = None,
    interrupt_after: int | None = None,
    max_tokens: int = 8,
    **sampling,
):
    """A whole session. The script and the conversation after it."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **sampling)
    conversation, script = Conversation(llm, params, system), Script(*lines)
    script.interrupt_after = interrupt_after
    Session(conversation, script, script).loop()
    return script, conversation
