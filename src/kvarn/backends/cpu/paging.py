"""What large pages add to the memory of weights and cells: the ends of the mappings that native/pages.cpp makes.

A page is physical memory as a whole once one byte of it was written.
"""

from collections.abc import Iterable
from pathlib import Path

from kvarn import native
from kvarn.cache.spec import align

LINE = 64  # allocations that share a mapping begin at cache lines
SMALL_PAGE = 4096
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def lost_bytes(sizes: Iterable[int]) -> int:
    """Of allocations of these sizes, in this order."""
    page, mapped, asked, used = page_bytes(), 0, 0, None
    for size in sizes:
        asked += size
        if size >= native.ALONE:
            mapped += align(size, page)
        elif used is None or used + size > native.SHARED_PAGES:
            mapped += align(used or 0, page)
            used = align(size, LINE)
        else:
            used += align(size, LINE)
    return mapped + align(used or 0, page) - asked


def page_bytes() -> int:
    """Large, unless the system has none or does not give them."""
    try:
        return SMALL_PAGE if "[never]" in SETTING.read_text(encoding="ascii") else native.LARGE_PAGE
    except (OSError, ValueError):
        return SMALL_PAGE
