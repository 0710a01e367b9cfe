"""How fast things go, measured as they run: computing tokens, reading files, writing cells into the cache."""

MEMORY = 0.25  # the weight of the newest measurement


class Rate:
    """Units per second. It has no value until something was measured, or a guess."""

    def __init__(self, guess: float | None = None) -> None:
        self._guess = guess
        self._measured: float | None = None

    def add(self, units: float, seconds: float) -> None:
        if units <= 0 or seconds <= 0:
            return
        now = units / seconds
        # Times are averaged, not speeds: one slow read must count as much as it hurts.
        self._measured = now if self._measured is None else 1 / ((1 - MEMORY) / self._measured + MEMORY / now)

    def seconds(self, units: float) -> float:
        """Expected time. An unknown speed is infinite: then it is tried, and measured."""
        speed = self._measured or self._guess
        return 0.0 if speed is None else units / speed
