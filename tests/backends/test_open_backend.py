"""Backends are opened by name."""

import itertools

import pytest

from kvarn.backends import BACKENDS, open_backend
from kvarn.backends.pool import make_pool, processors
from kvarn.errors import KvarnError


def test_backends_are_opened_by_name() -> None:
    assert open_backend("cpu", threads=1).facts().keys() == {"name", "isa", "order"}
    assert open_backend("reference").facts() == {"name": "reference"}
    with pytest.raises(KvarnError, match="unknown backend 'gpu'; there are: cpu, cuda, reference"):
        open_backend("gpu")
    for name, threads in itertools.product(BACKENDS, (0, 5000)):
        with pytest.raises(KvarnError, match="threads"):
            open_backend(name, threads)


@pytest.mark.parametrize("threads", [processors() + 1, 1024])
def test_there_are_no_more_threads_than_processors(threads: int, caplog: pytest.LogCaptureFixture) -> None:
    """A thousand threads on two processors did not finish two tokens in 20 s."""
    assert make_pool(threads).size == processors()
    assert f"{threads} threads: this process may use {processors()} processors" in caplog.text
    caplog.clear()
    assert make_pool(processors()).size == processors()
    assert not caplog.text
