"""What one step of a model reads and computes: bytes of weights and multiplications, from the fused graph.

Weights count by their packed kind, because kinds differ in speed. The embedding is read row by row, so it
counts only where it is also the output matrix. After the last attention only the wanted rows are computed.
Non-goals: cells (cache/plan.py knows them); seconds (speed.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvarn.graph.fuse import fuse
from kvarn.graph.kinds import Attention, Kind, Logits, Product, Select
from kvarn.graph.record import Graph


class Matrix(NamedTuple):
    """A packed matrix: what it is and what it takes."""

    kind: str
    nbytes: int
    n_numbers: int  # multiplications of one row


class Amount(NamedTuple):
    nbytes: int = 0
    per_token: int = 0  # multiplications for every token of a step
    per_wanted: int = 0  # and for every row whose logits are wanted

    def plus(self, matrix: Matrix, wanted_only: bool) -> "Amount":
        per_token, per_wanted = (0, matrix.n_numbers) if wanted_only else (matrix.n_numbers, 0)
        return Amount(self.nbytes + matrix.nbytes, self.per_token + per_token, self.per_wanted + per_wanted)


@dataclass(frozen=True, slots=True)
class Work:
    products: Mapping[str, Amount]  # by kind
    n_products: int
    n_attentions: int
    vocabulary: int

    @property
    def weight_bytes(self) -> int:
        """That every step reads."""
        return sum(amount.nbytes for amount in self.products.values())


def work_of(graph: Graph, matrices: Mapping[str, Matrix], vocabulary: int) -> Work:
    amounts: dict[str, Amount] = {}
    n_products = n_attentions = 0
    wanted_only = False
    for kind in fuse(graph):
        n_attentions += isinstance(kind, Attention)
        wanted_only = wanted_only or isinstance(kind, Select)
        names = _weights(kind)
        n_products += bool(names)
        for name in names:
            matrix = matrices[name]
            amounts[matrix.kind] = amounts.get(matrix.kind, Amount()).plus(matrix, wanted_only)
    return Work(amounts, n_products, n_attentions, vocabulary)


def _weights(kind: Kind) -> tuple[str, ...]:
    match kind:
        case Product():
            return tuple(segment.matrix for segment in kind.segments)
        case Logits():
            return (kind.weight,)
        case _:
            return ()
