"""Snapshots of a loaded model: take, load, continue, verify. `LLM` has one, as `llm.snapshots`.

Taking computes the text if the cache does not have it, and then reads its cells between two steps. Loading checks the
whole file before anything is touched. Any thread may call; other requests go on meanwhile.
Non-goals: the file (lasting/snapshot.py); names in a folder (lasting/collection.py).
"""

import secrets
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, replace
from hashlib import sha256
from os import PathLike
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from kvarn import __version__
from kvarn.engine.params import UNBOUNDED, SamplingParams
from kvarn.engine.request import Begun
from kvarn.errors import BadSnapshot, KvarnError, NoRoomNow
from kvarn.jobs.job import SILENT, Job, Listener, Output
from kvarn.jobs.runner import Runner
from kvarn.lasting import snapshot as files
from kvarn.lasting.cells import Cells, check_fits, lack_of, restore, take
from kvarn.lasting.fingerprint import Fingerprint
from kvarn.lasting.snapshot import Answer, Facts, Snapshot, SnapshotFile
from kvarn.lasting.verify import compare, recompute
from kvarn.text.tokenizer import Tokenizer
from kvarn.words import counted

ATTEMPTS = 5  # other requests may evict a text between its computation and its reading
_NOT_KEPT = ("seed", "n", "logits_processors", "prompt_logprobs", "json_schema", "regex", "choice", "grammar")


class Restored(NamedTuple):
    """A snapshot that was restored."""

    name: str
    tokens: list[int]
    nbytes: int  # of the file
    seconds: float  # to read, check and restore it


class Snapshots:
    def __init__(self, runner: Runner, tokenizer: Tokenizer, fingerprint: Callable[[], Fingerprint], name: str) -> None:
        self._runner, self._tokenizer, self._fingerprint, self._name = runner, tokenizer, fingerprint, name
        self._engine = runner.engine

    # -- taking ----------------------------------------------------------------------------------------------------

    def save(
        self,
        path: Path,
        tokens: Sequence[int],
        answer: Answer | None = None,
        chat: Any = None,
        salt: bytes = b"",
        conversation: Hashable = None,
        folder: int | None = None,
        watch: Callable[[Job], object] = lambda job: None,
    ) -> Facts:
        """Write a snapshot of this text. `conversation`: of the request that computed it, if there was one. `watch` is
        called with the job that computes it, if one is needed. `folder`: descriptor that the path starts at."""
        fingerprint = self._fingerprint()
        cells = self._cells(list(tokens), salt, conversation, watch)
        facts = Facts(__version__, 0, self._name, 0, fingerprint, self._decides_tokens(), (), answer)
        return files.save(path, facts, list(tokens), cells, self._engine.cache.plan, chat, folder)

    def _cells(
        self,
        tokens: list[int],
        salt: bytes,
        conversation: Hashable = None,
        watch: Callable[[Job], object] = lambda job: None,
    ) -> Cells:
        conversation = object() if conversation is None else conversation
        for _ in range(ATTEMPTS):
            if (found := self._runner.call(lambda: self._taken(tokens, salt, conversation))) is not None:
                return found
            params = SamplingParams(max_tokens=1, temperature=0.0)
            job = self._runner.add(tokens, params, salt, conversation, priority=1)
            try:
                watch(job)
                self._runner.wait(job)
            finally:
                self._runner.cancel(job)
        raise KvarnError(f"the cache is too full to keep {counted(len(tokens), 'token')} for a moment: try again")

    def _taken(self, tokens: list[int], salt: bytes, conversation: Hashable) -> Cells | None:
        engine = self._engine
        seq = engine.restored.find(tokens, salt, conversation)
        if seq is None:
            return None
        try:
            return take(engine.cache, engine.memory, seq)
        finally:
            engine.restored.give_back(seq, tokens, salt, conversation)

    def _decides_tokens(self) -> str:
        tokenizer = self._tokenizer
        return sha256(repr((tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.chat_template)).encode()).hexdigest()

    # -- loading ---------------------------------------------------------------------------------------------------

    def load(
        self,
        path: str | PathLike[str],
        salts: Sequence[bytes] = (b"",),
        conversation: Hashable = None,
        priority: int = 1,
        name: str = "",
    ) -> Restored:
        """Restore a snapshot for each salt. Raises BadSnapshot, with the reason, if it cannot be used; KvarnError if
        there is no room now. Nothing has changed then."""
        began = time.perf_counter()
        with SnapshotFile(path) as file:
            return self._restore(file, self.read(file), salts, conversation, priority, name or Path(path).name, began)

    def load_open(self, file: SnapshotFile, salt: bytes, name: str) -> Restored:
        began = time.perf_counter()
        return self._restore(file, self.read(file), (salt,), None, 1, name, began)

    def read(self, file: SnapshotFile) -> Snapshot:
        """Everything in it, checked: it is of this model, complete, and undamaged."""
        cache = self._engine.cache
        file.require(self._fingerprint(), cache.plan)
        try:
            check_fits(cache, file.facts.n_tokens, file.facts.holes)
        except BadSnapshot as error:
            raise BadSnapshot(f"{file.name} cannot be restored: {error}") from None
        return file.read(self._tokenizer.vocab_size, cache.plan)

    def _restore(
        self,
        file: SnapshotFile,
        snapshot: Snapshot,
        salts: Sequence[bytes],
        conversation: Hashable,
        priority: int,
        name: str,
        began: float,
    ) -> Restored:
        engine, tokens = self._engine, snapshot.tokens

        def write(seq: int) -> None:
            restore(engine.cache, engine.memory, seq, tokens, snapshot.cells)

        def work(salt: bytes) -> Callable[[float], None]:
            self._make_room(len(tokens))
            return engine.restored.restore(tokens, write, name, salt, conversation, priority)

        done = [self._runner.call(lambda salt=salt: work(salt)) for salt in salts]  # type: ignore[misc]
        seconds = time.perf_counter() - began
        for note in done:
            self._runner.call(lambda note=note: note(seconds))  # type: ignore[misc]
        return Restored(name, tokens, file.facts.nbytes, seconds)

    def _make_room(self, n_tokens: int) -> None:
        """As for a request: sequences that wait for the next turn of a conversation go first."""
        while lack := lack_of(self._engine.cache, n_tokens):
            if not self._engine.scheduler.parked.drop_oldest():
                raise NoRoomNow(lack)

    # -- answers that go on ----------------------------------------------------------------------------------------

    def continued(
        self,
        path: str | PathLike[str],
        settings: Mapping[str, Any],
        conversation: Hashable = None,
        listener: Listener = SILENT,
    ) -> Job:
        """Restore a snapshot of an answer and queue the rest of it. `settings` replace those of the snapshot;
        max_tokens counts new tokens."""
        with SnapshotFile(path) as file:
            answer = file.facts.answer
            if answer is None:
                raise BadSnapshot(f"{file.name} has no answer that could go on: give a prompt")
            params = _params(file.name, answer, settings)
        loaded = self.load(path, conversation=conversation)
        prompt, begun = loaded.tokens[: answer.start], loaded.tokens[answer.start :]
        more = UNBOUNDED if params.max_tokens is None else params.max_tokens
        params = replace(params, max_tokens=min(more + len(begun), UNBOUNDED))
        return self._runner.add(
            prompt, params, conversation=conversation, listener=listener, begun=Begun(begun, answer.sample)
        )

    # -- verifying -------------------------------------------------------------------------------------------------

    def verify(self, path: str | PathLike[str], n: int, seed: int, progress: Callable[[int, int], None]) -> int:
        """Compute n tokens of a snapshot again, drawn by chance, and compare their cells bit by bit. The number
        compared. Raises BadSnapshot if a bit differs."""
        with SnapshotFile(path) as file:
            snapshot = self.read(file)
        cells, tokens = snapshot.cells, snapshot.tokens
        if any(cells.holes) or n >= cells.n:  # what its first tokens saw is not in the file: all are computed
            compare(cells, self._cells(tokens, secrets.token_bytes(16)))
            return cells.n - max(map(len, cells.holes), default=0)
        places = Random(seed).sample(range(1, cells.n), min(n, cells.n - 1))
        return self._runner.call(lambda: self._verified(snapshot, places, progress))

    def _verified(self, snapshot: Snapshot, places: Sequence[int], progress: Callable[[int, int], None]) -> int:
        engine, seq = self._engine, -1  # no request has this number
        self._make_room(len(snapshot.tokens))
        engine.cache.open(seq, secrets.token_bytes(16))
        try:
            restore(engine.cache, engine.memory, seq, snapshot.tokens, snapshot.cells)
            found = recompute(engine.program, engine.cache, engine.memory, seq, snapshot, places)
            for done, _ in enumerate(found, 1):
                progress(done, len(places))
        finally:
            engine.cache.free(seq)
        return len(places)


def answer_of(output: Output, sample: int = 0) -> tuple[list[int], Answer | None]:
    """The tokens of a prompt and its answer, and what continues it; None if the answer has ended."""
    params = output.params
    if output.completions[sample].finish_reason == "stop":
        return [*output.prompt_token_ids, *output.completions[sample].tokens], None
    if params.logits_processors or params.structure is not None:
        raise KvarnError("an answer with logits processors or a structure cannot go on from a snapshot")
    settings = {f.name: getattr(params, f.name) for f in fields(SamplingParams) if f.name not in _NOT_KEPT}
    tokens = [*output.prompt_token_ids, *output.completions[sample].tokens]
    return tokens, Answer(len(output.prompt_token_ids), output.seed, sample, settings)


def _params(name: str, answer: Answer, settings: Mapping[str, Any]) -> SamplingParams:
    kept = {key: value for key, value in answer.settings.items() if key != "max_tokens"}
    if "logit_bias" in kept:
        kept["logit_bias"] = {int(key): value for key, value in dict(kept["logit_bias"]).items()}
    try:
        return SamplingParams(**{**kept, **settings, "seed": answer.seed})
    except (TypeError, ValueError) as error:
        if isinstance(error, KvarnError):
            raise BadSnapshot(f"{name}: the settings of its answer are wrong: {error}") from None
        raise BadSnapshot(f"{name}: the settings of its answer are not known to this kvarn") from None
