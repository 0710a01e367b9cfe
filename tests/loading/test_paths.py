"""Paths as users type them."""

from pathlib import Path

import pytest

from kvarn.errors import KvarnError
from kvarn.loading.paths import user_path


def test_paths_as_users_type_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/m.gguf") == tmp_path / "m.gguf"
    assert user_path("./~nouser-at-all/x") == Path("./~nouser-at-all/x")
    assert user_path("a b") == Path("a b")


@pytest.mark.parametrize(
    ("text", "said"), [("~nouser-at-all/x", "there is no home folder ~nouser-at-all;"), ("a\0b", "cannot be a path")]
)
def test_paths_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(KvarnError, match=said) as caught:
        user_path(text)
    assert str(caught.value).isprintable()
