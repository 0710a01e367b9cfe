"""What callers give: one prompt or several, one conversation or several, with settings for all or for each."""

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from kvarn.engine.params import SamplingParams, with_settings
from kvarn.errors import KvarnError
from kvarn.text.tokenizer import Prompt

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
Conversation = str | Sequence[Message]  # a text is the message of a user
OneOrEach = SamplingParams | Sequence[SamplingParams] | None


def paired(
    prompts: Sequence[Prompt], params: OneOrEach, settings: Mapping[str, Any]
) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its SamplingParams."""
    if params is None or isinstance(params, SamplingParams) or not isinstance(params, list | tuple):
        return [(prompt, each) for each in [with_settings(params, settings)] for prompt in prompts]  # type: ignore[arg-type]
    if len(params) != len(prompts):
        raise KvarnError(f"{len(prompts)} prompts and {len(params)} params: give one for all, or one for each")
    return [(prompt, with_settings(each, settings)) for prompt, each in zip(prompts, params, strict=True)]


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one prompt or several."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not hasattr(prompts, "__len__"):
        raise KvarnError(f"a prompt is {type(prompts).__name__}: give text, token ids, or a list of such prompts")
    if len(prompts) and all(hasattr(prompt, "__len__") for prompt in prompts):
        return list(prompts)  # type: ignore[arg-type]
    return [ids_of(prompts)]


def ids_of(prompt: object) -> list[int]:
    """Token ids as integers. Nothing else is converted to an id."""
    try:
        if isinstance(prompt, bytes | bytearray):
            raise TypeError
        return [index(token) for token in prompt]  # type: ignore[attr-defined]
    except TypeError:
        raise KvarnError("the prompt has a token that is not an integer: give text or token ids") from None


def is_one_conversation(given: object) -> bool:
    """A text, or a list of messages. Otherwise it is a list of conversations."""
    if isinstance(given, str):
        return True
    if isinstance(given, Mapping) or not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
        raise KvarnError(f"a conversation is {type(given).__name__}: give text, or a list of messages")
    return not given or all(isinstance(each, Mapping) for each in given)


def messages_of(conversation: object) -> list[Message]:
    """The messages of one conversation, checked."""
    if isinstance(conversation, str):
        return [{"role": "user", "content": conversation}]
    if not isinstance(conversation, Sequence) or isinstance(conversation, bytes | bytearray):
        raise KvarnError(f"a conversation is {type(conversation).__name__}: give text, or a list of messages")
    for number, message in enumerate(conversation):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            wrong = f"message {number} is {type(message).__name__}" if not isinstance(message, Mapping) else ""
            wrong = wrong or f"message {number} has no role"
            raise KvarnError(f'{wrong}: a message is {{"role": "user", "content": "..."}}')
    if not conversation:
        raise KvarnError("the conversation has no message: give at least one")
    return list(conversation)
