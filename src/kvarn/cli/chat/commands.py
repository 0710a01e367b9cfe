"""The commands of `kvarn chat`: a line that begins with a slash. Each command is one function and one row of COMMANDS.

A command returns what it prints. Errors are KvarnErrors of one line. Non-goals: reading lines, answering.
"""

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import NamedTuple

from kvarn.cli.chat import saved, settings
from kvarn.cli.chat.conversation import Conversation
from kvarn.cli.ending import speed
from kvarn.cli.parser import shown
from kvarn.cli.table import human_bytes
from kvarn.engine.explain import explain, in_words
from kvarn.errors import KvarnError
from kvarn.words import counted

NO_SYSTEM = "there is no system message of yours (the model's template may have its own)"


class Command(NamedTuple):
    argument: str  # how the help names it; empty if there is none
    help: str
    run: Callable[[Conversation, str], str] | None  # None: the session itself does it


def show_help(conversation: Conversation, argument: str) -> str:
    rows = [(f"{name} {command.argument}".rstrip(), command.help) for name, command in COMMANDS.items()]
    keys = [
        ("//TEXT", "send /TEXT as a message"),
        ('"""', 'a message of several lines begins and ends with """'),
        ("Alt-Enter", "begin a new line; so does Enter after a backslash"),
        ("Ctrl-C", "stop the answer, or clear the line"),
        ("Ctrl-R", "search what was typed before"),
        ("Ctrl-D", "leave"),
    ]
    width = max(len(name) for name, _ in [*rows, *keys]) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in [*rows, *keys])


def clear(conversation: Conversation, argument: str) -> str:
    conversation.clear()
    return "the conversation is forgotten" + ("; the system message stays" if conversation.system else "")


def system(conversation: Conversation, argument: str) -> str:
    before = conversation.system
    if not argument:
        return before or f"{NO_SYSTEM}; /system TEXT sets one"
    removed = argument in ('""', "''")
    if removed and not before:
        return NO_SYSTEM
    conversation.system = None if removed else argument
    what = "the system message is " + ("removed" if removed else "replaced" if before else "set")
    return what + ("; the conversation goes on" if conversation.n_turns else "")


def undo(conversation: Conversation, argument: str) -> str:
    what = "question" if conversation.waits else "question and its answer"
    conversation.undo()
    left = conversation.n_turns
    return f"removed the last {what}; " + (f"{counted(left, 'turn')} before it" if left else "nothing was before it")


def change(conversation: Conversation, argument: str) -> str:
    if not argument:
        return settings.listed(conversation.params)
    conversation.params, name = settings.changed(conversation.params, argument)
    return f"{name} is {settings.spelled(conversation.params, name)}"


def save(conversation: Conversation, argument: str) -> str:
    name = _file("/save", argument)
    if not conversation.messages:
        raise KvarnError("there is nothing to save yet")
    saved.save(name, conversation.messages)
    return f"saved {counted(len(conversation.messages), 'message')} to {name}"


def load(conversation: Conversation, argument: str) -> str:
    messages = saved.load(_file("/load", argument))
    conversation.restore(messages)
    waits = "; the last one is a question: /regenerate answers it" if conversation.waits else ""
    return f"loaded {counted(len(messages), 'message')}{waits}"


def explain_last(conversation: Conversation, argument: str) -> str:
    job = conversation.last
    if job is None:
        return "nothing has been answered yet"
    explanation = explain(job.request)
    spell = partial(conversation.llm.tokenizer.decode, special=True)
    answer = f"the answer has {counted(len(job.output().tokens), 'token')}{speed(job)}"
    if explanation.first_token_ms is not None and explanation.total_ms is not None:
        answer += f"; the first came after {explanation.first_token_ms:.0f} ms, the last after "
        answer += f"{explanation.total_ms:.0f} ms"
    return f"{in_words(explanation, spell)}\n{answer}"


def show_cache(conversation: Conversation, argument: str) -> str:
    plan, usage = conversation.llm.cache.plan, conversation.llm.cache.usage()
    held = usage.tokens_resident
    lines = [
        f"strategy  {plan.strategy.name}: {plan.strategy.placement} placement, {plan.layout.name} layout, "
        f"{plan.codec.name} cells",
        f"memory    {human_bytes(usage.nbytes)}, {usage.blocks_used + usage.blocks_cached:,} of "
        f"{counted(usage.blocks, 'block')} in use",
        f"held      {counted(held, 'token')} of {conversation.context:,} ({held / conversation.context:.0%})",
    ]
    if conversation.left_out:
        lines.append(f"left out  {counted(conversation.left_out, 'turn')} of {conversation.n_turns}")
    return "\n".join(lines)


COMMANDS = {
    "/help": Command("", "this text (also /?)", show_help),
    "/clear": Command("", "forget all except the system message (also /reset)", clear),
    "/system": Command("[TEXT]", 'show the system message, or replace it; "" removes it', system),
    "/set": Command("[NAME VALUE]", "show the settings of sampling, or change one", change),
    "/regenerate": Command("", "answer the last question again", None),
    "/undo": Command("", "remove the last question and its answer", undo),
    "/save": Command("FILE", "save the conversation as JSON", save),
    "/load": Command("FILE", "continue a saved conversation", load),
    "/explain": Command("", "what the last answer reused, and why not more (also /stats)", explain_last),
    "/cache": Command("", "the cache: strategy, memory, tokens held", show_cache),
    "/quit": Command("", "leave (also /exit, /bye, Ctrl-D)", None),
}
ALIASES = {"/?": "/help", "/reset": "/clear", "/stats": "/explain", "/exit": "/quit", "/bye": "/quit"}
NEVER_GUESSED = {"/clear", "/reset", "/undo"}  # they lose text


def find(line: str) -> tuple[str, Command, str]:
    """The command of a line by its full name, and its argument."""
    typed, *rest = line.split(maxsplit=1)
    argument = rest[0].strip() if rest else ""
    name = ALIASES.get(typed, typed)
    command = COMMANDS.get(name)
    as_message = f"to send it as a message: /{shown(line)}"
    if command is None:
        near = get_close_matches(typed, [each for each in (*COMMANDS, *ALIASES) if each not in NEVER_GUESSED], 1, 0.75)
        guess = f"did you mean {near[0]}? " if near else "/help lists the commands; "
        raise KvarnError(f"there is no command {shown(typed)}: {guess}{as_message}")
    if argument and not command.argument:
        raise KvarnError(f"{typed} takes nothing after it; {as_message}")
    return name, command, argument


def _file(command: str, argument: str) -> str:
    """The name of a file. It may be in quotes, as in a shell."""
    quoted = len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "\"'"
    name = argument[1:-1] if quoted else argument
    if not name:
        raise KvarnError(f"{command} FILE: give the name of a file")
    return name
