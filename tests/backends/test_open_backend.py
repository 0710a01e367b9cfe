"""Backends are opened by name."""

import itertools

import pytest

from kvarn.backends import BACKENDS, open_backend
from kvarn.errors import KvarnError


def test_backends_are_opened_by_name() -> None:
    assert open_backend("cpu", threads=1).facts().keys() == {"name", "isa", "order"}
    assert open_backend("reference").facts() == {"name": "reference"}
    with pytest.raises(KvarnError, match="unknown backend 'gpu'; there are: cpu, reference"):
        open_backend("gpu")
    for name, threads in itertools.product(BACKENDS, (0, 5000)):
        with pytest.raises(KvarnError, match="threads"):
            open_backend(name, threads)
