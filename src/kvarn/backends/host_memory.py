"""How much memory this machine has, and how much of it a process can have now."""

import os
from contextlib import suppress
from pathlib import Path


def memory_bytes() -> int | None:
    """Physical memory. It must be checked: an allocation can be larger, because pages are backed at the first write."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # the system does not report it
        return None


def available_bytes() -> int | None:
    """Physical memory that this process can have: what the system says is available, within the limit of its group."""
    found = [each for each in (_system_available(), _group_available()) if each is not None]
    return min(found, default=None)


def _system_available() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return memory_bytes()


def _group_available() -> int | None:
    """What is left of a container's limit; None if there is none. Pages of files can be taken back."""
    folder = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(limit - used + int(stat.get("inactive_file", 0)), 0)
    return None
