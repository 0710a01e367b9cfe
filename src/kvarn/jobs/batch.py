"""What callers give: one prompt or several, one conversation or several, with settings for all or for each."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import index
from typing import Any

from kvarn.engine.params import SamplingParams, with_settings
from kvarn.errors import KvarnError
from kvarn.text.tokenizer import Prompt

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
Messages = str | Sequence[Message]  # a conversation; a text is the message of a user
OneOrEach = SamplingParams | Sequence[SamplingParams] | None


def paired(
    prompts: Sequence[Prompt], params: OneOrEach, settings: Mapping[str, Any]
) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its SamplingParams."""
    if not isinstance(params, list | tuple):
        params = [with_settings(params, settings)] * len(prompts)  # type: ignore[arg-type]
    elif len(params) == len(prompts):
        params = [with_settings(each, settings) for each in params]
    else:
        raise KvarnError(f"{len(prompts)} prompts and {len(params)} params: give one for all, or one for each")
    return list(zip(prompts, params, strict=True))


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one prompt or several."""
    if isinstance(prompts, Iterator):
        prompts = list(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise KvarnError(f"a prompt is {type(prompts).__name__}: give text, token ids, or a list of such prompts")
    if all(isinstance(prompt, str) or _is_list(prompt) for prompt in prompts):
        return list(prompts)  # type: ignore[arg-type]
    return [ids_of(prompts)]


def ids_of(prompt: object) -> list[int]:
    """Token ids as integers. Nothing else is converted to an id."""
    try:
        if not _is_list(prompt) or any(isinstance(token, bool) for token in prompt):  # type: ignore[attr-defined]
            raise TypeError
        return [index(token) for token in prompt]  # type: ignore[attr-defined]
    except TypeError:
        raise KvarnError("the prompt has a token that is not an integer: give text or token ids") from None


def _is_list(given: object) -> bool:
    """Lists, tuples, arrays: what has an order and is no text."""
    return hasattr(given, "__len__") and not isinstance(given, str | bytes | bytearray | Mapping | AbstractSet)


def is_one_conversation(given: object) -> bool:
    """A text, or a list of messages. Otherwise it is a list of conversations."""
    return isinstance(given, str) or all(isinstance(each, Mapping) for each in _conversation(given))


def messages_of(conversation: object) -> list[Message]:
    """The messages of one conversation, checked. Parts of text are joined."""
    if isinstance(conversation, str):
        return [{"role": "user", "content": conversation}]
    messages = _conversation(conversation)
    if not messages:
        raise KvarnError("the conversation has no message: give at least one")
    return [_checked(number, message) for number, message in enumerate(messages)]


def _conversation(given: object) -> Sequence[Any]:
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
        raise KvarnError(f"a conversation is {type(given).__name__}: give text, or a list of messages")
    return given


def _checked(number: int, message: object) -> Message:
    like = 'a message is {"role": "user", "content": "..."}'
    if not isinstance(message, Mapping):
        raise KvarnError(f"message {number} is {type(message).__name__}: {like}")
    if not isinstance(message.get("role"), str):
        raise KvarnError(f"message {number} has no role: {like}")
    content = message.get("content")
    if isinstance(content, list | tuple) and all(_is_text(part) for part in content):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    if message.get("tool_calls"):
        _check_calls(number, message["tool_calls"])
        content = content or ""
    if not isinstance(content, str):
        what = "has no content" if content is None else f"has a content of {type(content).__name__}"
        raise KvarnError(f"message {number} {what}: give text, or a list of text parts")
    return message


def _check_calls(number: int, calls: object) -> None:
    if not isinstance(calls, list | tuple) or not all(map(_is_call, calls)):
        like = '[{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{}"}}]'
        raise KvarnError(f"message {number} has tool_calls of another form: give {like}")


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
