"""How many threads the kernels use. On the reference backend that is a matter of NumPy's BLAS."""

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from kvarn.errors import KvarnError


def limit_threads(n: int | None) -> None:
    """None leaves what BLAS chose: one per core."""
    if n is None:
        return
    if n < 1:
        raise KvarnError(f"{n} threads; it must be at least 1")
    threadpool_limits(n, user_api="blas")
