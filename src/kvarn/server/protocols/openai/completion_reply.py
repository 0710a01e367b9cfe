"""The answers of OpenAI's text completions."""

import math
from collections.abc import Sequence

from kvarn.dialect import Content
from kvarn.jobs.job import TokenLogprob
from kvarn.server.parse import Call
from kvarn.server.protocols.base import Part, Setting
from kvarn.server.protocols.logprobs import LEAST
from kvarn.server.protocols.openai.reply import OpenAIReply
from kvarn.server.schema import Json


class CompletionReply(OpenAIReply):
    prefix = "cmpl"
    whole_kind = chunk_kind = "text_completion"

    def __init__(self, setting: Setting, call: Call) -> None:
        super().__init__(setting, call)
        self._offsets: dict[int, int] = {}  # characters of each choice sent so far
        self._begun: set[int] = set()  # choices that have a chunk

    def _place(self, body: Json, name: str, of_prompts: list[Json]) -> None:
        for choice in body["choices"]:
            choice[name] = of_prompts[choice["index"] // self._call.n]

    def _add_ids(self, part: Part, found: list[Json]) -> None:
        super()._add_ids(part, found)
        if part.index not in self._begun:
            self._begun.add(part.index)
            found[0]["prompt_token_ids"] = list(self._setting.prompts[part.index // self._call.n])

    def _choice(self, part: Part) -> Json:
        end = {"logprobs": self._logprobs(part.index, part.logprobs), "finish_reason": part.finish or "stop"}
        return {"index": part.index, "text": part.answer.content, **end}

    def _empty(self, index: int) -> Json:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def _chunks(self, part: Part) -> list[Json]:
        text = "".join(delta.text for delta in part.deltas if isinstance(delta, Content))
        entries = self._logprobs(part.index, part.logprobs)
        return [{"index": part.index, "text": text, "logprobs": entries, "finish_reason": part.finish}]

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob] | None) -> Json | None:
        if entries is None:
            return None
        offset, offsets, tokens = self._offsets.get(index, 0), [], []
        for entry in entries:
            tokens.append(self._spelled(entry.token))
            offsets.append(offset)
            offset += len(tokens[-1])
        self._offsets[index] = offset
        tops = [
            {self._spelled(token): max(p, LEAST) for token, p in entry.top} if not math.isnan(entry.logprob) else None
            for entry in entries
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [_or_null(entry.logprob) for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _or_null(logprob: float) -> float | None:
    """NaN stands for the first token of a prompt, which no token predicts."""
    return None if math.isnan(logprob) else max(logprob, LEAST)
