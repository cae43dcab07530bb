"""For the tests of the launcher: a small run to talk to; what is imported or compiled once is kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.small_run import TOKEN, SmallRun

if TYPE_CHECKING:
    from tests.support.lived import Lives
    from tests.support.played_sky import PlayedSky


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


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lives:
    """Live a run: `live(acts={"serve": …}, command=[…], flags={…})`."""
    from tests.support.lived import Lives

    for name in [name for name in os.environ if name.startswith("LAUNCH_")]:
        monkeypatch.delenv(name)
    # A run of seconds is looked at more often than one of hours.
    monkeypatch.setattr("launcher.run.pulse._ASK_EVERY_SECONDS", 0.1)
    monkeypatch.setattr("launcher.run.work._LOOK_EVERY_SECONDS", 0.05)
    monkeypatch.setattr("launcher.run.work._DRAW_EVERY_SECONDS", 0.2)
    return Lives(tmp_path)


@pytest.fixture(scope="session")
def played_sky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedSky]:
    """SkyPilot's own code in front of played providers; one for all tests, importing it takes seconds."""
    from tests.support.played_sky import PlayedSky

    played = PlayedSky(tmp_path_factory.mktemp("played"))
    yield played
    played.close()
