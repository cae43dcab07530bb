"""For the tests of the launcher: a small run to talk to; what is imported or compiled once is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.small_run import TOKEN, SmallRun


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """Where PYTHONDONTWRITEBYTECODE is set, each guardian and minder would compile its imports again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield


@pytest.fixture(scope="session")
def warm() -> None:
    """What DSPy imports at its first call takes longer than a rollout may in some tests."""
    import dspy

    with dspy.context(lm=dspy.utils.DummyLM([{"french": "mot"}])):
        dspy.Predict("english -> french")(english="hello")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SmallRun]:
    """An endpoint that speaks our routes, where a program finds its run."""
    small = SmallRun()
    monkeypatch.setenv("LAUNCH_BASE_URL", small.base_url)
    monkeypatch.setenv("LAUNCH_API_KEY", TOKEN)
    monkeypatch.setenv("LAUNCH_RUN_DIR", str(tmp_path))
    yield small
    small.close()
