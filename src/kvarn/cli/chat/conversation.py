"""A conversation with a model: its messages, the prompt of the next answer, and the room for it.

The messages are kept whole. When they no longer fit into the context, the oldest turns (a question with
its answer) are left out of the prompt; the system message stays. A call that raises changes nothing. A
question whose answer never began waits: it is answered again, or the next question replaces it.
Non-goals: input, output, files.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvarn.cli.chat.saved import Message
from kvarn.engine.params import UNBOUNDED, SamplingParams
from kvarn.errors import KvarnError, PromptTooLong
from kvarn.jobs.job import Job
from kvarn.jobs.question import Question
from kvarn.llm import LLM

ID = "chat"  # of the conversation's sequence in the cache; there is one


@dataclass(frozen=True, slots=True)
class Turn:
    """A question that is being answered."""

    job: Job
    messages: list[Message]  # all, up to the question
    left_out: int  # oldest turns that are not in the prompt
    newly_left_out: int


class Conversation:
    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self.llm = llm
        self.params = llm.for_chat(params)
        self.messages: list[Message] = []
        self.left_out = 0  # oldest turns that are not in the prompt
        self.last: Job | None = None
        self._n_drawn_again = 0
        self.system = system

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer together."""
        return min(self.llm.cache.plan.context, self.llm.cache.longest)

    @property
    def room(self) -> int:
        """Tokens that are kept free for an answer: a quarter of the context, or max_tokens if that is less."""
        return max(min(self.params.max_tokens or UNBOUNDED, self.context // 4), 1)

    @property
    def system(self) -> str | None:
        return self.messages[0]["content"] if _has_system(self.messages) else None

    @system.setter
    def system(self, text: str | None) -> None:
        rest = self.messages[_has_system(self.messages) :]
        self.messages = ([{"role": "system", "content": text}] if text else []) + rest

    @property
    def n_turns(self) -> int:
        return len(_starts(self.messages))

    @property
    def waits(self) -> bool:
        """Whether the last message is a question without an answer."""
        return bool(self.messages) and self.messages[-1]["role"] == "user"

    def clear(self) -> None:
        """Forget everything except the system message."""
        self.restore(self.messages[: _has_system(self.messages)])

    def restore(self, messages: list[Message]) -> None:
        """Continue from these messages. Raises if the chat template refuses them."""
        if messages:
            self.llm.render(messages)
        self.llm.runner.forget(ID)
        self.messages, self.left_out, self.last = list(messages), 0, None

    def ask(self, text: str) -> Turn:
        """Queue the answer to a new question, which replaces one that waits. `finish` makes the turn a part of the
        conversation."""
        before = self.messages[:-1] if self.waits else self.messages
        return self._start([*before, {"role": "user", "content": text}], self.params)

    def ask_again(self) -> Turn:
        """Queue another answer to the last question."""
        starts = _starts(self.messages)
        if not starts:
            raise KvarnError("there is no question yet that could be answered again")
        self._n_drawn_again += 1
        seed = self.params.seed
        params = self.params if seed is None else replace(self.params, seed=(seed + self._n_drawn_again) % (1 << 63))
        return self._start(self.messages[: starts[-1] + 1], params)

    def repeats(self, turn: Turn) -> bool:
        """Whether the answer can only be the last one again: nothing is drawn, and prompt and settings are the same."""
        if self.last is None or self.params.temperature != 0 or self.last.output().finish_reason == "cancelled":
            return False
        ours, theirs = turn.job.request, self.last.request
        same_settings = replace(ours.params, seed=None) == replace(theirs.params, seed=None)
        return same_settings and list(ours.prompt) == list(theirs.prompt)

    def finish(self, turn: Turn) -> bool:
        """Add the question and what was said. False if it ended before anything was said: then the question waits,
        or keeps the answer that it has."""
        output = turn.job.output()
        self.last = turn.job
        said = bool(output.text) or output.finish_reason not in ("cancelled", "error")
        if said:
            self.messages = [*turn.messages, output.message]
        elif self.messages[: len(turn.messages)] != turn.messages:
            self.messages = turn.messages
        self.left_out = turn.left_out
        return said

    def undo(self) -> None:
        """Remove the last question and its answer."""
        starts = _starts(self.messages)
        if not starts:
            raise KvarnError("there is no question yet that could be removed")
        self.messages = self.messages[: starts[-1]]
        self.left_out = min(self.left_out, max(len(starts) - 2, 0))

    def _start(self, messages: list[Message], params: SamplingParams) -> Turn:
        question, left_out = self._fit(messages, params)
        job = self.llm.start_question(question, conversation=ID)
        return Turn(job, messages, left_out, left_out - self.left_out)

    def _fit(self, messages: list[Message], params: SamplingParams) -> tuple[Question, int]:
        """What can be answered, and how many of the oldest turns its prompt leaves out."""
        system, starts = messages[: _has_system(messages)], _starts(messages)
        newest = len(starts) - 1
        made: dict[int, Question] = {}

        def length(left_out: int) -> int:
            if left_out not in made:
                first = starts[left_out] if left_out else len(system)
                (made[left_out],) = self.llm.questions([[*system, *messages[first:]]], params, {})
            return len(made[left_out].prepared.tokens)

        def enough(tokens: int) -> int:
            return _first(lambda k: length(k) <= tokens, self.left_out, newest)

        context = self.context
        left_out = min(self.left_out, newest)
        if length(left_out) + self.room > context:
            left_out = enough(context - self.room)
            # Every change at the front of the prompt computes all of it again. So make room for several turns at
            # once, but keep the last answer if it fits.
            left_out = max(left_out, min(enough(context // 2), newest - 1))
        if length(left_out) >= context:
            raise self._too_long(length(left_out), system, messages[-1:])
        return made[left_out], left_out

    def _too_long(self, n: int, system: list[Message], question: list[Message]) -> PromptTooLong:
        """Which part of a prompt of n tokens is too long, even without earlier turns."""
        template = "the chat template"
        fault, beside, shorten = "this message", f"the system message and {template}" if system else template, ""
        if system and 2 * len(self.llm.render(question)) < n:
            fault, beside, shorten = "the system message", f"this message and {template}", " (/system TEXT)"
        return PromptTooLong(
            f"{fault} is too long: with {beside} it has {n:,} tokens, and the context holds {self.context:,}; "
            f"shorten it{shorten}, or start kvarn with a larger context (-c)"
        )


def _has_system(messages: list[Message]) -> bool:
    return bool(messages) and messages[0]["role"] == "system"


def _starts(messages: list[Message]) -> list[int]:
    """Where the turns begin."""
    return [i for i, message in enumerate(messages) if message["role"] == "user"]


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The least of low ... high for which it holds, or `high`. If it holds for one, it holds for those after it."""
    return low + bisect_left(range(low, high), True, key=holds)
