"""For the tests of the launcher: the processes they start may keep what they compile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """Where PYTHONDONTWRITEBYTECODE is set, each guardian and minder would compile its imports again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield
