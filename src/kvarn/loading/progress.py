"""How long work reports its progress: it calls a function with what it does, how much is done, and of how much."""

from collections.abc import Callable

Progress = Callable[[str, int, int | None], None]  # what, how much is done, the total where it is known


def quiet(what: str, done: int, total: int | None) -> None:
    """Show nothing."""
