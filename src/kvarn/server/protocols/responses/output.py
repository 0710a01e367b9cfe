"""The output items of a response, and the events that tell of them, from the parts of an answer.

A whole answer goes through the same steps as a stream, so both have the same items. A call that turned out to be none
is announced in a stream and ends as incomplete; the output does not have it, because its text is in a message.
"""

from collections.abc import Iterable, Iterator, Sequence

from kvarn.dialect import CallArguments, CallBegin, CallEnd, Content, Delta, Malformed, Reasoning
from kvarn.server.protocols.responses.items import new_id
from kvarn.server.schema import Json

Event = Json
TEXTS = {  # kind of item: type of its part, and the names of its events
    "message": ("output_text", "response.output_text"),
    "reasoning": ("reasoning_text", "response.reasoning_text"),
}


class Output:
    def __init__(self) -> None:
        self.items: list[Json] = []  # those that are complete
        self._n = 0  # how many were announced
        self._item: Json | None = None  # the one that is written
        self._text: list[str] = []  # of it
        self._space = ""  # before a message: it is part of one only if a text follows
        self._entries: list[Json] = []  # log-probabilities that no event had yet
        self._all_entries: list[Json] = []

    def push(self, deltas: Iterable[Delta], logprobs: Sequence[Json] = ()) -> Iterator[Event]:
        self._entries += logprobs
        self._all_entries += logprobs
        for delta in deltas:
            match delta:
                case Reasoning(text):
                    yield from self._written("reasoning", text)
                case Content(text) | Malformed(text):
                    yield from self._content(text)
                case CallBegin(_, id, name):
                    yield from self._begin("function_call", call_id=id, name=name, arguments="")
                case CallArguments(_, text):
                    yield from self._arguments(text)
                case CallEnd(_, True):
                    yield from self._end("completed")

    def finish(self, status: str) -> Iterator[Event]:
        """The answer is complete. An answer without any text has an empty message."""
        if self._space and not any(item["type"] == "function_call" for item in self.items):
            yield from self._written("message", self._space)
        if not self._n:
            yield from self._begin("message", role="assistant", content=[])
        yield from self._end("incomplete" if self._calling else status, listed=not self._calling)

    @property
    def _calling(self) -> bool:
        """A call has begun and not ended. If anything else comes, it is none."""
        return self._item is not None and self._item["type"] == "function_call"

    def _content(self, text: str) -> Iterator[Event]:
        begun = self._item is not None and self._item["type"] == "message"
        if not begun and not (self._space + text).strip():
            self._space += text
            return
        text, self._space = ("" if begun else self._space) + text, ""
        yield from self._written("message", text)

    def _written(self, kind: str, text: str) -> Iterator[Event]:
        if not text:
            return
        if self._item is None or self._item["type"] != kind:
            more: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._begin(kind, **more, content=[])
        self._text.append(text)
        logprobs = {"logprobs": self._taken()} if kind == "message" else {}
        yield self._told(f"{TEXTS[kind][1]}.delta", content_index=0, delta=text, **logprobs)

    def _arguments(self, text: str) -> Iterator[Event]:
        if text:
            self._text.append(text)
            yield self._told("response.function_call_arguments.delta", delta=text)

    def _begin(self, kind: str, **fields: object) -> Iterator[Event]:
        yield from self._end("incomplete" if self._calling else "completed", listed=not self._calling)
        self._item, self._text = {"id": new_id(kind), "type": kind, "status": "in_progress", **fields}, []
        self._n += 1
        yield self._of_item("added", self._item)
        if kind in TEXTS:
            yield self._told("response.content_part.added", content_index=0, part=self._part(""))

    def _end(self, status: str, listed: bool = True) -> Iterator[Event]:
        item, text = self._item, "".join(self._text)
        if item is None:
            return
        if item["type"] == "function_call":
            item = {**item, "arguments": text}
            yield self._told("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            logprobs = {"logprobs": self._all_entries} if item["type"] == "message" else {}
            part = self._part(text)
            item = {**item, "content": [part]}
            yield self._told(f"{TEXTS[item['type']][1]}.done", content_index=0, text=text, **logprobs)
            yield self._told("response.content_part.done", content_index=0, part=part)
        item = {**item, "status": status}
        yield self._of_item("done", item)
        if listed:
            self.items.append(item)
        self._item, self._text = None, []

    def _part(self, text: str) -> Json:
        assert self._item is not None
        kind = TEXTS[self._item["type"]][0]
        if kind != "output_text":
            return {"type": kind, "text": text}
        return {"type": kind, "text": text, "annotations": [], "logprobs": self._all_entries if text else []}

    def _taken(self) -> list[Json]:
        taken, self._entries = self._entries, []
        return taken

    def _of_item(self, what: str, item: Json) -> Event:
        return {"type": f"response.output_item.{what}", "output_index": self._n - 1, "item": item}

    def _told(self, kind: str, **fields: object) -> Event:
        assert self._item is not None
        return {"type": kind, "item_id": self._item["id"], "output_index": self._n - 1, **fields}
