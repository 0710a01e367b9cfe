"""Compiles structures for one tokenizer, within limits of size and time.

Contract: any thread may compile. Equal structures share one Compiled (a bounded LRU). llguidance runs on a
thread with a large stack, because it recurses, and is given up after `seconds`: a hostile structure is
refused, and the process lives. Non-goals: the grammar (guidance.py), the state of a sample (state.py, marker.py).
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from kvarn.errors import BadStructure, StructuresBusy
from kvarn.structured import guidance
from kvarn.structured.marker import Following, Marker
from kvarn.structured.state import Guided
from kvarn.structured.structure import Structure
from kvarn.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_STACK = 64 << 20  # bytes; only the pages that are touched take memory
_MOST_AT_ONCE = 4  # threads that compile, those that were given up included
_MOST_MARKERS = 16  # a model has one or two
_slots = threading.BoundedSemaphore(_MOST_AT_ONCE)
_starting = threading.Lock()  # the size of a stack is a setting of the process
Result = TypeVar("Result")


class Compiled:
    """A structure that answers can follow. Immutable; any thread may start answers."""

    def __init__(self, matcher: "LLMatcher", marker: Callable[[str, str | None], Marker]) -> None:
        self._matcher = matcher
        self._marker = marker

    def start(self, after: str | None = None, begin: str | None = None) -> "Guided | Following":
        """The state of one sample. With `after`, every token but the end token is allowed until the answer has this
        text; then at most 8 bytes of white space may come, and then the structure. With `begin`, only an answer that
        begins with this text is free until `after`; any other answer is the structure from its start."""
        guided = Guided(self._matcher)
        return guided if after is None else Following(guided, self._marker(after, begin))


class Compiler:
    """`eos_ids` end an answer. Nothing is built before the first structure is compiled."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int], seconds: float = 10.0, most: int = 64) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = tuple(eos_ids)
        self._seconds = seconds
        self._most = most
        self._lock = threading.Lock()  # guards the cache
        self._building = threading.Lock()  # guards the vocabulary, which takes a second to build, and the markers
        self._vocabulary: LLTokenizer | None = None
        self._cache: OrderedDict[Structure, Compiled] = OrderedDict()
        self._markers: dict[tuple[str, str | None], Marker] = {}

    def compile(self, structure: Structure) -> Compiled:
        """Raises BadStructure if the structure is wrong, too large, or cannot be enforced, and StructuresBusy."""
        if (found := self.known(structure)) is not None:
            return found
        vocabulary = self._built()
        matcher = bounded(lambda: guidance.matcher_of(vocabulary, guidance.grammars_of(structure)), self._seconds)
        compiled = Compiled(matcher, self.marker)
        with self._lock:
            self._cache[structure] = compiled
            while len(self._cache) > self._most:
                self._cache.popitem(last=False)
        return compiled

    def known(self, structure: Structure) -> Compiled | None:
        """What was compiled before. Never waits for long."""
        with self._lock:
            found = self._cache.get(structure)
            if found is not None:
                self._cache.move_to_end(structure)
            return found

    def first_refused(self, structures: Iterable[tuple[str, Structure]]) -> tuple[str, BadStructure] | None:
        """The name of the first one that cannot be enforced, and why. All together have the time of one."""
        vocabulary = self._built()

        def find() -> list[tuple[str, BadStructure]]:
            for name, structure in structures:
                try:
                    guidance.matcher_of(vocabulary, guidance.grammars_of(structure))
                except BadStructure as error:
                    return [(name, error)]
            return []

        return next(iter(bounded(find, self._seconds)), None)

    def marker(self, text: str, begin: str | None = None) -> Marker:
        """A text after which structures begin. Finding its tokens takes as long as reading the vocabulary once."""
        key = text, begin
        with self._building:
            if key not in self._markers:
                if len(self._markers) >= _MOST_MARKERS:
                    self._markers.clear()
                self._markers[key] = Marker.of(self._tokenizer, text, self._eos_ids, begin)
            return self._markers[key]

    def _built(self) -> "LLTokenizer":
        with self._building:
            if self._vocabulary is None:
                self._vocabulary = guidance.tokenizer_of(self._tokenizer, self._eos_ids)
            return self._vocabulary


def bounded(work: Callable[[], Result], seconds: float) -> Result:
    """Do the work on a thread with a large stack. Raises BadStructure if it takes longer, and StructuresBusy if it
    cannot begin in this time."""
    done: SimpleQueue[tuple[Result | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:  # noqa: BLE001 (llguidance raises an exception of its own where it has a bug)
            done.put((None, error))
        finally:
            _slots.release()

    if not _slots.acquire(timeout=seconds):
        raise StructuresBusy("other structures are being compiled, and they take long: try again later")
    with _starting:
        before = threading.stack_size(_STACK)
        try:
            threading.Thread(target=run, name="kvarn-structure").start()
        except BaseException:
            _slots.release()
            raise
        finally:
            threading.stack_size(before)
    try:
        result, error = done.get(timeout=seconds)
    except Empty:
        raise BadStructure(f"the structure takes more than {seconds:g} s to compile: make it simpler") from None
    if isinstance(error, BadStructure):
        raise error
    if error is not None:
        raise BadStructure(f"the structure cannot be compiled ({type(error).__name__}: {error}): change it")
    assert result is not None
    return result
