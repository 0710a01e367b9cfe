"""An error or an interrupt at any line of the bookkeeping: nothing is held, and no answer is wrong."""

from pathlib import Path

import pytest
from support.any_line import SETTINGS, attack
from support.serving import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), 512)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_an_error_at_any_line(model: Path, settings: dict, error: type[BaseException]) -> None:
    """Every 301st line; `make attack` takes more of them."""
    assert attack(model, settings, error, first=0, stride=301) > 10
