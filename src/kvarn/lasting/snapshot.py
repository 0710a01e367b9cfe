"""A snapshot: the tokens and cells of one text in a file, `NAME.kvs`, and what is needed to go on with it.

    tokens      the ids of the text
    k.0 v.0 ..  cells of each layer in canonical order (cells.py), with scales if the codec has them; of whole tiles
                if it has a tail
    chat        optional: a conversation and its settings, as JSON

The metadata says what made the cells (fingerprint.py). A snapshot is used only where its cells are the bits that would
be computed; otherwise it is refused, with the reason. An answer may be in it with its seed and settings, so that it
goes on with the very tokens that it would have had.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from kvarn.cache.plan import Plan
from kvarn.errors import BadSnapshot, KvarnError
from kvarn.lasting import container
from kvarn.lasting.cells import FULL, Cells, Field, fields_of, whole_tiles
from kvarn.lasting.container import Container, Tensor
from kvarn.lasting.fingerprint import Fingerprint, layers_of

FORMAT = "kvarn snapshot 1"
SUFFIX = ".kvs"
MOST_CHAT = 64 << 20
_DTYPES = {"f4": "F32", "f2": "F16", "u2": "BF16", "u4": "U32", "u1": "U8"}


@dataclass(frozen=True)
class Answer:
    """A sampled answer: its first token in the text, and what decides the next one."""

    start: int  # position of its first token
    seed: int
    sample: int  # which of the request's samples
    settings: Mapping[str, Any]  # of SamplingParams


@dataclass(frozen=True)
class Facts:
    """What a snapshot says about itself."""

    kvarn: str  # version
    created: int  # seconds since the epoch
    model: str  # name, for people
    n_tokens: int
    fingerprint: Fingerprint
    tokenizer: str  # digest of what decides tokens: the vocabulary and the chat template
    holes: tuple[range, ...]  # by layer
    answer: Answer | None = None
    has_chat: bool = False
    nbytes: int = 0  # of the file


@dataclass(frozen=True)
class Snapshot:
    facts: Facts
    tokens: list[int]
    cells: Cells


def save(
    path: Path,
    facts: Facts,
    tokens: list[int],
    cells: Cells,
    plan: Plan,
    chat: Any = None,
    folder: int | None = None,
) -> Facts:
    """Write a snapshot. Raises KvarnError with the reason if it cannot be written; then nothing has changed."""
    facts = replace(facts, created=int(time.time()), n_tokens=len(tokens), holes=cells.holes)
    facts = replace(facts, fingerprint=facts.fingerprint.until(len(tokens), layers_of(plan)))
    ids = np.array(tokens, np.uint32)
    tensors = {"tokens": (Tensor("U32", ids.shape), ids.view(np.uint8))}
    for field in every_field(plan):
        rows = cells.rows[field.name]
        tensors[field.name] = (Tensor(_DTYPES[field.unit], (len(rows), field.heads, field.units)), rows.reshape(-1))
    if chat is not None:
        text = np.frombuffer(json.dumps(chat).encode(), np.uint8)
        tensors["chat"] = (Tensor("U8", text.shape), text)
    try:
        size = container.write(path, _texts(facts), tensors, folder)
    except OSError as error:
        raise KvarnError(f"{path} cannot be written: {error.strerror or error}") from None
    return replace(facts, has_chat=chat is not None, nbytes=size)


def every_field(plan: Plan) -> list[Field]:
    """By layer."""
    return sorted((field for group in plan.groups for field in fields_of(group)), key=lambda field: field.layer)


def _texts(facts: Facts) -> dict[str, str]:
    answer = {} if facts.answer is None else {"answer": json.dumps(asdict(facts.answer))}
    return {
        "format": FORMAT,
        "kvarn": facts.kvarn,
        "created": str(facts.created),
        "model": facts.model,
        "fingerprint": json.dumps(asdict(facts.fingerprint)),
        "tokenizer": facts.tokenizer,
        "holes": json.dumps([[hole.start, hole.stop] for hole in facts.holes]),
        **answer,
    }


class SnapshotFile:
    """An open snapshot. Its header was checked; tensors are checked when they are read."""

    def __init__(self, path: str | PathLike[str], follow: bool = True, folder: int | None = None) -> None:
        self._file = Container(path, follow, folder)
        self.name = self._file.name
        try:
            self.facts = self._facts()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "SnapshotFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _facts(self) -> Facts:
        texts, tensors = self._file.texts, self._file.tensors
        if texts.get("format") != FORMAT:
            found = texts.get("format", "none")
            raise BadSnapshot(f"{self.name} has the format {found!r} and this kvarn reads {FORMAT!r}: make it again")
        try:
            wanted = {field.name for field in fields(Fingerprint)}
            made = json.loads(texts["fingerprint"])
            if made.keys() != wanted or not all(isinstance(each, str) for each in made.values()):
                raise ValueError
            answer = _answer(json.loads(texts["answer"])) if "answer" in texts else None
            holes = tuple(range(int(a), int(b)) for a, b in json.loads(texts["holes"]))
            (n,) = tensors["tokens"].shape
            facts = Facts(
                *(texts["kvarn"], int(texts["created"]), texts["model"], n, Fingerprint(**made), texts["tokenizer"]),
                *(holes, answer, "chat" in tensors, self._file.size),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise BadSnapshot(f"{self.name} is no snapshot of kvarn: its metadata is incomplete") from None
        if tensors["tokens"].dtype != "U32" or not n or (answer is not None and not 0 < answer.start <= n):
            raise BadSnapshot(f"{self.name} is no snapshot of kvarn: its tokens are wrong")
        return facts

    def require(self, fingerprint: Fingerprint, plan: Plan) -> None:
        """Raise BadSnapshot unless these are the cells that this cache would have, in number and in bits."""
        here = fingerprint.until(self.facts.n_tokens, layers_of(plan))
        if reason := self.facts.fingerprint.difference(here):
            raise BadSnapshot(f"{self.name} cannot be used here: it was {reason}")
        n, holes = self.facts.n_tokens, self.facts.holes
        if len(holes) != plan.n_layers or not all(0 <= h.start <= h.stop < n or h == FULL for h in holes):
            raise BadSnapshot(f"{self.name} is no snapshot of kvarn: its windows are wrong")
        wanted = {"tokens": Tensor("U32", (n,))}
        for field in every_field(plan):
            shape = (whole_tiles(plan, n) - len(holes[field.layer]), field.heads, field.units)
            wanted[field.name] = Tensor(_DTYPES[field.unit], shape)
        found = {name: tensor for name, tensor in self._file.tensors.items() if name != "chat"}
        if found != wanted:
            raise BadSnapshot(f"{self.name} is no snapshot of this model: its tensors have other names or shapes")

    def read(self, vocabulary: int, plan: Plan) -> Snapshot:
        """Everything, with all digests compared. `require` comes first: it bounds what is read."""
        names = [name for name in self._file.tensors if name != "chat"]
        arrays = self._file.read_all(names)
        tokens = arrays.pop("tokens").view(np.uint32)
        if int(tokens.max()) >= vocabulary:
            raise BadSnapshot(f"{self.name} has a token outside the vocabulary of {vocabulary}")
        rows = {field.name: arrays[field.name].reshape(-1, field.width) for field in every_field(plan)}
        n = whole_tiles(plan, self.facts.n_tokens)
        return Snapshot(self.facts, tokens.tolist(), Cells(n, self.facts.holes, rows))

    def chat(self) -> Any:
        """The conversation, not checked but for its digest; None if there is none."""
        if not self.facts.has_chat:
            return None
        if self._file.tensors["chat"].nbytes > MOST_CHAT:
            raise BadSnapshot(f"{self.name}: its conversation has more than {MOST_CHAT >> 20} MiB")
        try:
            return json.loads(self._file.read("chat").tobytes())
        except (ValueError, RecursionError):
            raise BadSnapshot(f"{self.name}: its conversation is not JSON") from None

    def check(self) -> None:
        """Compare all digests, with little memory."""
        for name in self._file.tensors:
            self._file.check(name)


def _answer(found: Any) -> Answer:
    start, seed, sample, settings = (found[name] for name in ("start", "seed", "sample", "settings"))
    if not all(type(each) is int for each in (start, seed, sample)) or not isinstance(settings, dict):
        raise ValueError
    return Answer(start, seed, sample, settings)
