"""Prompts that continue: an answered conversation, by a suffix of its tokens, or the text of the last message.

Of an answered conversation the tokens stay as they are: neither the template nor the tokenizer sees its earlier turns
again. Only what the template writes after an answer is rendered, with a short conversation in place of the earlier one:
the end of the turn, the new messages, and the opening of the next answer. A marker in the answer shows where it ends.
If the template does not show the end of a turn clearly, there is no suffix, and the caller must render everything.
"""

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvarn.dialect import Dialect
from kvarn.errors import KvarnError
from kvarn.text.quoting import StandIns

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], tuple[str, StandIns]]


class Suffix(NamedTuple):
    """`prompt` ends with the suffix; what it begins with stands for the conversation."""

    text: str
    prompt: str
    stand_ins: StandIns


def suffix(
    render: Render, answer: Message, new: Sequence[Message], ends: Iterable[str], control: Iterable[str]
) -> Suffix | None:
    """`answer`: the last message of the conversation. `new` begins with a message of another role. `ends`: the texts of
    the tokens that end a turn, `control`: of all control tokens."""
    mark, other = (f"kvarn{secrets.token_hex(12)}" for _ in range(2))
    before = [{"role": "user", "content": "."}, _marked(answer, mark)]
    prompt, stand_ins = render([*before, *new])
    probe, _ = render([*before, {**new[0], "content": other}, *new[1:]])
    if prompt.count(mark) != 1 or probe.count(mark) != 1 or probe.count(other) != 1:
        return None
    begin = prompt.index(mark) + len(mark)
    first = probe.index(other)  # where the new messages begin, at the latest
    found = [at for end in ends if end and begin <= (at := prompt.find(end, begin)) < first]
    if found:
        at = min(found)
    elif not answer.get("tool_calls"):
        at = begin
    else:
        return None
    text = prompt[at:]
    if prompt[:at] != probe[:at] or not any(each and text.startswith(each) for each in control):
        return None  # without a control token at its beginning, its tokens could depend on what comes before
    return Suffix(text, prompt, stand_ins)


def up_to_the_end(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> str:
    """What the template writes up to the end of the last message's text, as transformers cuts it. White space at its
    end stays only if the template does not strip it."""
    *before, last = messages
    text, mark = last["content"], f"kvarn{secrets.token_hex(12)}"
    rendered = render([*before, {**last, "content": f"{text}{mark} "}])
    at = rendered.rfind(mark)
    prompt = rendered[: max(at, 0)]
    if not rendered.startswith(f"{mark} ", at):
        prompt = prompt.rstrip()
    if at < 0 or not prompt.rstrip().endswith(text.strip()):
        raise KvarnError(
            "messages: the chat template changes the text of the last message, so an answer cannot continue it: end "
            "with a message of the user"
        )
    return prompt


def check_reasoning(dialect: Dialect, text: str) -> None:
    """Refuse a text that ends inside reasoning: what follows could be read as reasoning or as text."""
    begin, end = (marker.strip() for marker in dialect.reasoning or ("", ""))
    if begin and text.rfind(begin) > text.rfind(end) and not text.rstrip().endswith(begin):
        raise KvarnError(
            "messages: the last message ends inside reasoning, which cannot be continued: close the reasoning"
        )


def _marked(answer: Message, mark: str) -> Message:
    """The answer with the marker at its end."""
    calls = list(answer.get("tool_calls") or ())
    if not calls:
        return {"role": "assistant", "content": mark}
    function = {**calls[-1]["function"], "arguments": json.dumps({"value": mark})}
    return {"role": "assistant", "content": "", "tool_calls": [*calls[:-1], {**calls[-1], "function": function}]}
