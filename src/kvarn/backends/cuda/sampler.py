"""Samples rows of logits on the device: engine/sampling.py computes the same function, with the same bits.

    peak, choose                              the likeliest token: all that greedy draws need
    adjust, peak                              before `choose`, if rows have biases or penalties
    weigh, starts, scatter, draw              for draws with a temperature

Weights are whole numbers, so no result depends on the order of a sum. What the host sends is one array per round of
draws, and nothing if the device has it already, as with greedy draws of the same rows. Only ids come back, and they
stay on the device, too: the next step can be launched before the host reads them.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvarn.backends.base import Draw
from kvarn.backends.cuda import specs
from kvarn.backends.cuda.buffers import Allocation
from kvarn.backends.cuda.driver import Device, Event
from kvarn.backends.cuda.specs import BUCKETS, PEAK_PART, STRETCH
from kvarn.backends.cuda.store import POINTER_ALIGNMENT
from kvarn.cache.spec import align, ceil_div

UNIT = 2.0**44  # a weight of one
BYTES_PER_BUCKET = 4 + 4 + 8  # count, cursor, mass
LEAST_ROOM = 1 << 14  # bytes of what is sent
ROUNDS = 64  # of a step; more make the array of tokens grow


class Sampler:
    """Logits have `stride` numbers per row. Up to `most` draws run together."""

    def __init__(self, driver: Device, stride: int, most: int) -> None:
        self._driver, self._stride, self._most = driver, stride, most
        self._n_parts = ceil_div(stride, PEAK_PART)
        self._peaks = [Allocation(driver, 8 * most * self._n_parts) for _ in range(2)]
        self._tops = Allocation(driver, 4 * most)
        self._sums = Allocation(driver, most * (BYTES_PER_BUCKET * BUCKETS + 8))
        self._members = Allocation(driver, 4 * most * stride)
        self.tokens = Allocation(driver, 4 * most * ROUNDS)  # of the last step: by draw, if rounds are whole
        self._outboxes: list[tuple[NDArray[np.uint8], Event]] = []  # for tokens; those that wait for nothing
        self._edited: set[int] = set()  # rows, since `begin`
        self._inbox: Allocation | None = None
        self._host: list[NDArray[np.uint8]] = []
        self._sent = [driver.event(), driver.event()]
        self._turn = 0
        self._last = b""  # what the device has
        functions = (specs.peak, specs.choose, specs.adjust, specs.weigh, specs.starts, specs.scatter, specs.draw)
        self._functions = {make.__name__: driver.function(make()) for make in functions}

    @property
    def nbytes(self) -> int:
        held = (*self._peaks, self._tops, self._sums, self._members, self.tokens, self._inbox)
        return sum(each.nbytes for each in held if each is not None)

    def begin(self, n_rounds: int) -> None:
        """Make room for the tokens of a step."""
        if 4 * n_rounds * self._most > self.tokens.nbytes:
            self._driver.synchronize()
            self.tokens = Allocation(self._driver, 4 * n_rounds * self._most)
        self._edited.clear()

    def launch(self, turn: int, logits: int, first: int, draws: Sequence[Draw], n_tokens: int) -> None:
        """Launch a round of up to `most` draws. `first`: the row of the logits at this address."""
        drawn = [at for at, draw in enumerate(draws) if draw.temperature > 0]
        entries, biases = self._entries(draws, first)
        rows = np.array([draw.row - first for draw in draws], np.int32)
        settings = np.array([_settings(draw) for draw in draws]) if drawn or len(biases) else np.empty(0)
        at = self._send(settings, biases, rows, np.array(drawn, np.int32), entries)
        settings_at, biases_at, rows_at, drawn_at, entries_at = at
        own, edited = (each.address for each in self._peaks)
        parts = ceil_div(n_tokens, PEAK_PART)
        seen = (rows_at, logits)
        self._run("peak", (len(draws), parts, 1), *seen, own, n_tokens, self._stride)
        if len(biases):
            grid = (ceil_div(len(biases), STRETCH), 1, 1)
            self._run("adjust", grid, entries_at, biases_at, settings_at, logits, len(biases), self._stride)
            self._run("peak", (len(draws), parts, 1), *seen, edited, n_tokens, self._stride)
        tokens, tops = self.tokens.address + 4 * turn * self._most, self._tops.address
        self._run("choose", (len(draws), 1, 1), own, edited if len(biases) else own, tokens, tops, parts)
        if not drawn:
            return
        size = self._most * BUCKETS
        counts, kept = self._sums.address, self._sums.address + BYTES_PER_BUCKET * size
        masses, cursors = counts + 4 * size, counts + 12 * size
        self._driver.fill(self._sums.address, 0, self._sums.nbytes)
        given = (drawn_at, *seen, tokens, tops, settings_at)
        ends, grid = (n_tokens, self._stride), (len(drawn), ceil_div(n_tokens, STRETCH), 1)
        self._run("weigh", grid, *given, counts, masses, kept, *ends)
        self._run("starts", (len(drawn), 1, 1), counts, cursors)
        self._run("scatter", grid, *given, cursors, self._members.address, *ends)
        self._run("draw", (len(drawn), 1, 1), *given, counts, masses, kept, self._members.address, self._stride)

    def receive(self, counts: Sequence[int]) -> Callable[[], list[int]]:
        """Copy the tokens of the rounds, which have these numbers of draws. The result waits for them, once."""
        driver = self._driver
        nbytes = 4 * ((len(counts) - 1) * self._most + counts[-1])
        while self._outboxes and self._outboxes[-1][0].nbytes < nbytes:  # from before the tokens' array grew
            self._outboxes.pop()
        box = self._outboxes.pop() if self._outboxes else (driver.pinned(self.tokens.nbytes), driver.event())
        found = box[0][:nbytes]
        driver.receive(self.tokens.address, found)
        driver.record(box[1])

        def read() -> list[int]:
            driver.wait(box[1])
            ids = found.view(np.int32)
            tokens = [int(token) for turn, n in enumerate(counts) for token in ids[turn * self._most :][:n]]
            self._outboxes.append(box)
            return tokens

        return read

    def _run(self, name: str, grid: tuple[int, int, int], *args: int) -> None:
        self._driver.launch(self._functions[name], grid, args)

    def _send(self, *arrays: NDArray[np.float64] | NDArray[np.int32]) -> list[int]:
        """The device's addresses of the arrays."""
        sizes = [align(each.nbytes, POINTER_ALIGNMENT) for each in arrays]
        data = b"".join(each.tobytes().ljust(size, b"\0") for each, size in zip(arrays, sizes, strict=True))
        if self._inbox is None or len(data) > self._inbox.nbytes:
            self._driver.synchronize()
            room = max(2 * len(data), LEAST_ROOM)
            self._inbox, self._last = Allocation(self._driver, room), b""
            self._host = [self._driver.pinned(room) for _ in self._sent]
        elif data != self._last:
            self._driver.wait(self._sent[self._turn])
        if data != self._last:
            host = self._host[self._turn][: len(data)]
            host[:] = np.frombuffer(data, np.uint8)
            self._driver.send(self._inbox.address, host)
            self._driver.record(self._sent[self._turn])
            self._turn, self._last = 1 - self._turn, data
        return [self._inbox.address + sum(sizes[:i]) for i in range(len(sizes))]

    def _entries(self, draws: Sequence[Draw], first: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """(row, token, draw, count) and the bias of each edited number. A row that is drawn from twice is edited
        once."""
        entries, biases = [np.empty((0, 4), np.int32)], [np.empty(0)]
        for at, draw in enumerate(draws):
            if draw.edits is not None and draw.row not in self._edited:
                self._edited.add(draw.row)
                ids, counts, bias = draw.edits
                row, which = np.full_like(ids, draw.row - first), np.full_like(ids, at)
                entries.append(np.stack((row, ids, which, counts), 1).astype(np.int32))
                biases.append(bias)
        return np.concatenate(entries), np.concatenate(biases)


def _settings(draw: Draw) -> list[float]:
    drawn = [draw.temperature, draw.top_k, draw.top_p, draw.min_p * UNIT, draw.uniform]
    return [*drawn, draw.repetition, draw.presence, draw.frequency]
