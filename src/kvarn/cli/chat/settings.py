"""`/set` of `kvarn chat`: the numbers of SamplingParams, shown and changed during a conversation.

    /set                    lists them
    /set temperature 0.5    changes one for the next answers

The names are those of Python. Names of options (--top-p) and of other chats (`/set parameter num_predict 9`)
work, too. Non-goals: settings of the loaded model, as -c.
"""

from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from kvarn.cli.parser import shown
from kvarn.engine.params import UNBOUNDED, SamplingParams
from kvarn.errors import KvarnError

WHOLE_NUMBERS = ("max_tokens", "top_k", "seed")
NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
ALIASES = {
    "temp": "temperature",
    "n": "max_tokens",
    "predict": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
AT_START = {  # what is chosen when kvarn starts
    "num_ctx": "-c",
    "context": "-c",
    "ctx_size": "-c",
    "num_thread": "-t",
    "threads": "-t",
    "model": "-m",
}


def listed(params: SamplingParams) -> str:
    width = max(map(len, NAMES)) + 2
    return "\n".join(f"{name:<{width}}{spelled(params, name)}" for name in NAMES)


def spelled(params: SamplingParams, name: str) -> str:
    value = getattr(params, name)
    if name == "seed" and value is None:
        return "random"
    return "-1 (no limit)" if name == "max_tokens" and value >= UNBOUNDED else str(value)


def changed(params: SamplingParams, argument: str) -> tuple[SamplingParams, str]:
    """The settings after `/set ARGUMENT`, and the name of the one that is meant."""
    words = argument.split()
    if words[0] == "parameter" and len(words) > 1:
        words = words[1:]
    name = name_of(words[0])
    if len(words) == 1:
        return params, name
    if len(words) > 2:
        raise KvarnError(f"/set {name} takes one number: /set {name} VALUE")
    return replace(params, **{name: value_of(name, words[1])}), name


def name_of(typed: str) -> str:
    name = typed.lower().strip("-").replace("-", "_")
    name = ALIASES.get(name, name)
    if name in NAMES:
        return name
    if name in AT_START:
        raise KvarnError(f"{shown(typed)} is fixed during a chat: start kvarn with {AT_START[name]}")
    if name == "system":
        raise KvarnError("the system message is set with /system TEXT")
    near = get_close_matches(name, NAMES, 1, 0.75)
    guess = f"did you mean {near[0]}?" if near else "/set lists the settings"
    raise KvarnError(f"there is no setting {shown(typed)}: {guess}")


def value_of(name: str, typed: str) -> Any:
    if name == "seed" and typed.lower() in ("random", "none"):
        return None
    try:
        value = int(typed) if name in WHOLE_NUMBERS else float(typed)
    except ValueError:
        kind = "a whole number" if name in WHOLE_NUMBERS else "a number"
        raise KvarnError(f"{name} is {shown(typed)!r}; it must be {kind}") from None
    if name == "max_tokens" and value < 1 and value != -1:
        raise KvarnError(f"max_tokens is {value}; it must be at least 1, or -1 for no limit")
    return UNBOUNDED if name == "max_tokens" and value == -1 else value
