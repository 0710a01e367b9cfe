"""The type of a progress function. Long work calls it with a description, the amount done, and the total."""

from collections.abc import Callable

Progress = Callable[[str, int, int | None], None]  # what, how much is done, the total where it is known


def quiet(what: str, done: int, total: int | None) -> None:
    """Show nothing."""
