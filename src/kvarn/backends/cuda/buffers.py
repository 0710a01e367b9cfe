"""Device memory with an owner, and the rows in which values live between kernels."""

import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

from kvarn.backends.cuda.driver import Device
from kvarn.backends.cuda.specs import ROWS, TYPE_BYTES
from kvarn.backends.cuda.tiling import DEPTH
from kvarn.cache.spec import align


class Allocation:
    """Device memory that is released with this object."""

    def __init__(self, driver: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = driver.allocate(nbytes)
        self._release = weakref.finalize(self, driver.release, self.address)

    def release(self) -> None:
        self._release()


@dataclass(eq=False, slots=True)
class Rows:
    """A row per token (or per wanted row), of `width` numbers. The address changes only when a larger step comes."""

    form: str
    width: int
    padded: bool  # a matrix reads it: rows have a multiple of DEPTH numbers, and those after `width` are zero
    address: int = 0

    @property
    def stride(self) -> int:
        return align(self.width, DEPTH) if self.padded else self.width

    def nbytes(self, n_rows: int) -> int:
        return align(n_rows, ROWS) * self.stride * TYPE_BYTES[self.form]


class View(NamedTuple):
    """Some columns of f32 rows: a product writes the results of several matrices side by side."""

    rows: Rows
    column: int
    width: int

    @property
    def address(self) -> int:
        return self.rows.address + 4 * self.column

    @property
    def stride(self) -> int:
        return self.rows.stride


@dataclass(slots=True)
class Workspace:
    """The rows of a program. They are allocated together, for steps of up to `capacity` tokens."""

    driver: Device
    rows: list[Rows] = field(default_factory=list)
    capacity: int = 0
    memory: Allocation | None = None

    def add(self, form: str, width: int, padded: bool) -> Rows:
        self.rows.append(Rows(form, width, padded))
        return self.rows[-1]

    def nbytes(self, n_rows: int) -> int:
        return sum(align(rows.nbytes(n_rows), 256) for rows in self.rows)

    def reserve(self, n_rows: int) -> None:
        """Make room for steps of this many tokens. What the rows held is lost."""
        n_rows = align(n_rows, ROWS)
        if n_rows <= self.capacity:
            return
        if self.memory is not None:
            self.driver.synchronize()
            self.memory.release()
            self.memory, self.capacity = None, 0
        self.memory = Allocation(self.driver, self.nbytes(n_rows))
        self.capacity = n_rows
        self.driver.fill(self.memory.address, 0, self.memory.nbytes)  # the padding stays zero
        at = self.memory.address
        for rows in self.rows:
            rows.address = at
            at += align(rows.nbytes(n_rows), 256)
