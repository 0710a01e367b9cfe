import numpy as np
import pytest

from kvarn.backends.host import HostLogits

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.parametrize("wanted", [None, [0, 1, 2, 3], [1, 2], [3], range(2, 4)])
def test_neighbours_are_not_copied(wanted) -> None:
    found = HostLogits(ROWS).rows(wanted)
    assert (found == (ROWS if wanted is None else ROWS[list(wanted)])).all()
    assert np.shares_memory(found, ROWS)


@pytest.mark.parametrize("wanted", [[0, 2], [1, 0], [2, 2], []])
def test_other_rows_are_in_the_order_asked_for(wanted) -> None:
    assert HostLogits(ROWS).rows(wanted).tolist() == ROWS[wanted].tolist()
