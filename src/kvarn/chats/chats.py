"""Conversations with one model: from messages and tools to a prompt, a rule for the answer, and a reader of it.

The chat template is called through `render`, so that a server can run it in another process. Any thread may
prepare. Non-goals: running requests; the form of messages in a protocol.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvarn.chats.answer import Plain, Reader
from kvarn.chats.continuation import Suffix, check_reasoning, suffix, up_to_the_end
from kvarn.chats.history import for_template
from kvarn.chats.rules import Rule, rule_of
from kvarn.chats.tools import NO_TOOLS, ToolUse
from kvarn.dialect import Dialect, Parser, find, instructed, opens_reasoning
from kvarn.errors import KvarnError, printable
from kvarn.structured import Structure
from kvarn.text.chat import ChatTemplate
from kvarn.text.quoting import Quotes
from kvarn.text.tokenizer import Tokenizer

OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
Render = Callable[..., str]  # (messages, **variables)
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversation that can be answered.

    tokens      the prompt
    shown       control tokens that the reader must see in the text
    rule        that the answer follows; None if it is free
    """

    tokens: list[int]
    shown: frozenset[int]
    rule: Rule | None
    reader: Callable[[], Reader]


class Chats:
    """`render` is that of the template, or of a process that renders it."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, render: Render, quotes: Quotes) -> None:
        self.names = template.names  # of the variables that it uses
        self._source = template.strings[0]
        self._tokenizer = tokenizer
        self._render = render
        self._quotes = quotes
        self._finding = threading.Lock()
        self._dialect: Dialect | None = None

    @property
    def dialect(self) -> Dialect:
        with self._finding:
            if self._dialect is None:
                control = {self._tokenizer.token_bytes(id).decode(): id for id in self._tokenizer.control_ids}
                eos = [self._tokenizer.token_bytes(id).decode() for id in self._tokenizer.eos_ids]
                self._dialect = find(self._render, source=self._source, control=control, eos=eos)
            return self._dialect

    def prompt(
        self,
        messages: Sequence[Message],
        use: ToolUse = NO_TOOLS,
        variables: Mapping[str, Any] | None = None,
        opens: bool = True,
        continues: bool = False,
    ) -> tuple[str, Mapping[str, str]]:
        """The text of the prompt, and its stand-ins. `opens`: it ends where the answer begins. `continues`: that is the
        end of the last message's text."""
        check_variables({} if variables is None else variables)
        given: dict[str, Any] = {"messages": for_template(messages), "variables": dict(variables or {})}
        if use.shown or any("tool_calls" in message or message["role"] == "tool" for message in given["messages"]):
            dialect = self.dialect
            given["messages"] = for_template(messages, not dialect.arguments_as_text)
            if dialect.origin == "generic":
                given["messages"] = instructed(given["messages"], use.shown)
            elif use.shown:
                given["tools"] = list(use.shown)
        quoted = self._quotes.quote(given)
        values = quoted.values
        more = {"tools": values["tools"]} if "tools" in values else {}
        more |= {} if opens and not continues else {"add_generation_prompt": False}
        render = partial(self._render, **values["variables"], **more)
        if not continues:
            return render(values["messages"]), quoted.stand_ins
        check_reasoning(self.dialect, given["messages"][-1]["content"])
        return up_to_the_end(render, values["messages"]), quoted.stand_ins

    def suffix(
        self, answer: Message, new: Sequence[Message], use: ToolUse, variables: Mapping[str, Any]
    ) -> Suffix | None:
        """What continues the tokens of a conversation that ended with `answer`."""
        tokenizer = self._tokenizer
        ends = [tokenizer.token_bytes(id).decode("utf-8", "replace") for id in tokenizer.eos_ids]
        render = partial(self.prompt, use=use, variables=variables)
        return suffix(render, answer, new, ends, tokenizer.control_texts)

    def continued(self, tokens: Sequence[int], suffix: Suffix) -> list[int]:
        return [*tokens, *self._tokenizer.encode(suffix.text, bos=False, special=True, stand_ins=suffix.stand_ins)]

    def encode(self, prompt: str, stand_ins: Mapping[str, str]) -> list[int]:
        return self._tokenizer.encode(prompt, special=True, stand_ins=stand_ins)

    def prepare(
        self,
        prompt: str,
        stand_ins: Mapping[str, str],
        use: ToolUse = NO_TOOLS,
        structure: Structure | None = None,
        split: bool = True,
        tokens: list[int] | None = None,
    ) -> Prepared:
        """`split`: reasoning is not part of the text. `tokens`: of the prompt, if they are known. Raises KvarnError if
        calls of the tools cannot be enforced."""
        dialect = self.dialect
        opened = opens_reasoning(dialect, prompt)
        rule = rule_of(dialect, use, structure, prompt)
        read_as = dialect if split else replace(dialect, reasoning=None)
        markers = read_as.markers if use.tools else read_as.reasoning or ()
        shown = self._tokenizer.control_in(markers)
        hidden = tuple(self._tokenizer.token_bytes(id).decode() for id in sorted(shown))
        reader = partial(_reader, read_as, use, opened and split, hidden)
        tokens = self.encode(prompt, stand_ins) if tokens is None else tokens
        return Prepared(tokens, shown, rule, reader)


def check_variables(given: Any) -> None:
    """Of the chat template: those that a request may set."""
    name = "chat_template_kwargs"
    if not isinstance(given, Mapping):
        raise KvarnError(f"{name} is {printable(repr(given))[:80]}: give names and values")
    for key in given:
        if not isinstance(key, str) or not key.isidentifier():
            raise KvarnError(f"{name} has a key that is not a name")
        if key in OWN_VARIABLES:
            raise KvarnError(f"{name}.{key} cannot be set: it comes from the request")


def _reader(dialect: Dialect, use: ToolUse, opened: bool, hidden: tuple[str, ...]) -> Reader:
    if not use.tools and dialect.reasoning is None:
        return Reader(Plain())
    end = dialect.reasoning[1].strip() if dialect.reasoning else ""
    return Reader(Parser(dialect, use.tools, opened), end, hidden)
