"""All placements by name. To add one, write its file and add a line here."""

from typing import Any

from kvarn.cache.placement import Placement
from kvarn.cache.placements.cyclic import Cyclic
from kvarn.cache.placements.paged import Paged
from kvarn.cache.placements.slab import Slab

PLACEMENTS: dict[str, type[Placement[Any]]] = {
    "slab": Slab,
    "cyclic": Cyclic,
    "paged": Paged,
}
