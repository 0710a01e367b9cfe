"""Conversations that can be answered: prepared, with their settings and the constraint of their answers."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from kvarn.chats.chats import Chats, Prepared
from kvarn.chats.rules import Constrain, constrain
from kvarn.chats.tools import ToolUse
from kvarn.engine.params import SamplingParams
from kvarn.jobs.batch import Messages, messages_of
from kvarn.jobs.job import Job, Listener
from kvarn.jobs.runner import Runner


class Question(NamedTuple):
    """A conversation that can be answered, and how."""

    prepared: Prepared
    params: SamplingParams
    constrain: Constrain | None

    def start(self, runner: Runner, conversation: Hashable, listener: Listener) -> Job:
        ready = self.prepared
        return runner.add(
            ready.tokens,
            self.params,
            conversation=conversation,
            listener=listener,
            constrain=self.constrain,
            shown=ready.shown,
            reader=ready.reader,
        )


def questions_of(
    runner: Runner,
    chats: Chats,
    conversations: Sequence[Messages],
    params: Sequence[SamplingParams],
    use: ToolUse,
    variables: Mapping[str, Any] | None,
) -> list[Question]:
    """Each conversation with its params. All are prepared before the first structure is compiled."""
    prepared = [
        chats.prepare(*chats.prompt(messages_of(each), use, variables), use, one.structure)
        for each, one in zip(conversations, params, strict=True)
    ]
    return [
        Question(each, one, constrain(runner.compiler, each.rule)) for each, one in zip(prepared, params, strict=True)
    ]
