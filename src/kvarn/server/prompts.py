"""Turns texts and conversations into token ids. Never called on the engine's thread.

Chat templates run in a child process (templates.py). Conversations have threads of their own, so that a
slow template delays no other request.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple

from kvarn.chats.chats import Chats, Prepared
from kvarn.chats.continuation import Suffix
from kvarn.llm import LLM
from kvarn.server.causes import Causes
from kvarn.server.ignored import Ignored, is_no_op, of_constraint, of_variables
from kvarn.server.parse import Call, Mixed
from kvarn.server.refusal import Refusal
from kvarn.server.structures import structure_errors
from kvarn.server.talk import Talk
from kvarn.server.templates import TemplateProcess
from kvarn.text.quoting import StandIns, n_characters, restored

LONG_TEXT = 1 << 20  # characters; longer texts are counted only if they could fit into the context

SWITCHES = ("enable_thinking", "thinking")  # variables of templates that turn reasoning on and off
AROUND_EXTRA = 16  # tokens, at most, that separate extra files
EXCERPT = 2000  # tokens of each end of a prompt that can be in the log


class Chat(NamedTuple):
    """A conversation that can be answered, what the chat template has no use for, and what the answer should say."""

    prepared: Prepared
    ignored: list[Ignored]
    notes: dict[str, Any]


class Prompts:
    def __init__(self, llm: LLM) -> None:
        self.threads = ThreadPoolExecutor(4, "kvarn-chats")  # for conversations
        self._tokenizer = tokenizer = llm.tokenizer
        self._llm = llm
        self._template = TemplateProcess(tokenizer.chat_template or "", tokenizer.bos_token, tokenizer.eos_token)
        self.causes = Causes(tokenizer, lambda: self._chats, lambda talk: self._variables(talk)[0])

    def start(self) -> None:
        """Start the process for templates, so that the first conversation need not wait for it."""
        if self._tokenizer.chat_template:
            self._template.start()

    def close(self) -> None:
        self._template.close()
        self.threads.shutdown(wait=False, cancel_futures=True)

    def plain(self, prompt: Mixed, call: Call) -> list[int]:
        pieces = [prompt] if isinstance(prompt, str) else prompt
        self._check_size(sum(len(piece) for piece in pieces if isinstance(piece, str)))
        self._check_ids([piece for piece in pieces if not isinstance(piece, str)], "prompt")
        tokens: list[int] = []
        for i, piece in enumerate(pieces):
            if isinstance(piece, str):
                tokens += self._tokenizer.encode(piece, bos=None if i == 0 else False, special=call.special)
            else:
                tokens.append(piece)
        return tokens

    def with_gap(self, before: Mixed, after: str, call: Call) -> tuple[list[int], list[Ignored]]:
        """Of the extra files, the last ones that fit. Also what did not."""
        if not isinstance(before, str):
            raise Refusal(400, "suffix needs a prompt that is a text", "suffix")
        self._check_size(len(before) + len(after))
        tokens = self._tokenizer.encode_gap(before, after)
        if tokens is None:
            message = "suffix: the model has no tokens that mark a gap; use a model for filling in the middle"
            raise Refusal(400, message, "suffix")
        room = self._llm.cache.longest - len(tokens) - (call.max_tokens or 1) - AROUND_EXTRA
        first = len(call.extra)
        while first:
            each = call.extra[first - 1]
            if (len(each.name) + len(each.text)) // self._longest_token > room:
                break
            room -= len(self._tokenizer.encode(f"{each.name}\n{each.text}", bos=False)) + AROUND_EXTRA
            if room < 0:
                break
            first -= 1
        told = [Ignored("input_extra", f"input_extra[{i}]") for i in range(first)]
        return self._tokenizer.encode_gap(before, after, call.extra[first:]) or tokens, told

    def biases(self, call: Call) -> dict[int, float]:
        """Of the tokens of texts."""
        texts = call.biased_texts.items()
        return {id: bias for text, bias in texts for id in self._tokenizer.encode(text, bos=False)}

    def chat(self, call: Call, talk: Talk) -> Chat:
        """Ready for an answer."""
        continued, notes = self._continued(talk)
        if continued is None:
            prompt, stand_ins, ignored = self._prompt(talk)
            tokens = None
        else:
            (_, prompt, stand_ins), ignored = continued, self._variables(talk)[1]
            assert talk.before is not None
            tokens = self._chats.continued(talk.before.tokens, continued)
        with structure_errors(call.structure_field or "tools"):
            prepared = self._chats.prepare(prompt, stand_ins, talk.tools, call.structure, talk.split, tokens)
        if prepared.rule is not None:
            replaced = call.structure is not None and talk.tools.required
            ignored += of_constraint(call.settings["stop"], call.structure_field if replaced else "")
        return Chat(prepared, ignored, notes)

    def _continued(self, talk: Talk) -> tuple[Suffix | None, dict[str, Any]]:
        """What continues the tokens of an earlier answer, and what the answer says about it."""
        before = talk.before
        if before is None:
            return None, {}
        answer, new = talk.messages[before.n_messages - 1], talk.messages[before.n_messages :]
        why, found = before.changed, None
        if not why:
            self._check_size(n_characters(new))
            found = self._chats.suffix(answer, new, talk.tools, self._variables(talk)[0])
            why = "" if found else "the chat template does not show where an answer ends"
        if found:
            return found, {"continued": {"id": before.id, "tokens": len(before.tokens)}}
        return None, {"continued": {"id": before.id, "tokens": 0, "why": why}}

    def _prompt(self, talk: Talk, opens: bool = True) -> tuple[str, StandIns, list[Ignored]]:
        self._check_size(n_characters(talk.messages) + n_characters(talk.tools.shown))
        variables, ignored = self._variables(talk)
        prompt, stand_ins = self._chats.prompt(talk.messages, talk.tools, variables, opens, talk.continues)
        self._check_size(len(prompt))
        return prompt, stand_ins, ignored

    def _variables(self, talk: Talk) -> tuple[dict[str, Any], list[Ignored]]:
        """Those of the template, and what it does not use."""
        names, variables = self._chats.names, dict(talk.variables)
        ignored = of_variables(variables, names)
        if talk.effort is not None:
            variables.setdefault("reasoning_effort", talk.effort)
            used = "reasoning_effort" in names
            if talk.effort == "none" and "enable_thinking" in names:
                variables.setdefault("enable_thinking", False)
                used = True
            if not used and not is_no_op("reasoning_effort", talk.effort):
                ignored.append(Ignored("reasoning_effort", talk.effort_field))
        if talk.thinks is not None:
            switches = [name for name in SWITCHES if name in names]
            variables = dict.fromkeys(switches, talk.thinks) | variables
            if not switches and not (talk.thinks and self._chats.dialect.reasoning):
                ignored.append(Ignored("thinking", "thinking"))
        return variables, ignored

    @cached_property
    def _chats(self) -> Chats:
        """Also refuses a template that is wrong, or none."""
        llm = self._llm
        if not self._tokenizer.chat_template:
            raise Refusal(400, "the model has no chat template, so it cannot answer chats: use /v1/completions")
        return Chats(self._tokenizer, llm.template, self._template.render, llm.quotes)

    def tokenize(self, body: dict[str, Any]) -> list[int]:
        """llama.cpp's `content` has other defaults than vLLM's `prompt`."""
        if "talk" in body:
            prompt, stand_ins, _ = self._prompt(body["talk"])
            return self._chats.encode(prompt, stand_ins)
        theirs = "content" in body
        text = body["content" if theirs else "prompt"]
        if len(text) > LONG_TEXT:
            self._check_size(len(text))
        bos = body.get("add_special", False) if theirs else body.get("add_special_tokens", True)
        special = theirs and body.get("parse_special", True)
        return self._tokenizer.encode(text, bos=None if bos else False, special=special)

    def rendered(self, talk: Talk, opens: bool) -> str:
        """The text of a conversation's prompt. `opens`: with the beginning of the answer."""
        prompt, stand_ins, _ = self._prompt(talk, opens)
        return restored(prompt, stand_ins)

    def text(self, tokens: Sequence[int]) -> str:
        self._check_ids(tokens, "tokens")
        return self._tokenizer.decode(tokens, special=True)

    def spell(self, tokens: Sequence[int]) -> str:
        """Control tokens are shown."""
        return self._tokenizer.decode(tokens, special=True)

    def echoed(self, prompt: Mixed, tokens: Sequence[int]) -> str:
        """The text of a prompt for its own caller."""
        return prompt if isinstance(prompt, str) else self.text(tokens)

    def excerpt(self, tokens: Sequence[int]) -> str:
        """The text of a prompt for the log; of a long one, its beginning and its end."""
        if len(tokens) <= 2 * EXCERPT:
            return self.text(tokens)
        return f"{self.text(tokens[:EXCERPT])} ... {self.text(tokens[-EXCERPT:])}"

    @cached_property
    def _longest_token(self) -> int:
        """In bytes."""
        return max(len(self._tokenizer.token_bytes(id)) for id in range(self._tokenizer.vocab_size))

    def _check_ids(self, tokens: Sequence[int], field: str) -> None:
        """Refuse ids that have no text: a model may have more rows than its tokenizer has tokens."""
        if any(token >= self._tokenizer.vocab_size for token in tokens):
            raise Refusal(400, f"{field} has an id outside the vocabulary of {self._tokenizer.vocab_size}", field)

    def _check_size(self, n_characters: int) -> None:
        """Refuse a text that cannot fit before it is tokenized."""
        self.check_length(n_characters // self._longest_token, at_least=True)

    def check_length(self, n_tokens: int, at_least: bool = False) -> None:
        """Refuse a prompt of so many tokens (or more) if it leaves no room for an answer."""
        longest = self._llm.cache.longest
        if n_tokens >= longest:
            raise Refusal(
                400,
                f"the prompt has {'at least ' if at_least else ''}{n_tokens:,} tokens and this server's context is "
                f"{longest:,} tokens, prompt and answer together: shorten the prompt",
                code="context_length_exceeded",
                facts={"n_prompt_tokens": n_tokens, "n_ctx": longest},
            )
