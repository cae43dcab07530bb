"""For the tests of the launcher: a small run to talk to; what is imported or compiled once is kept."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.small_run import TOKEN, SmallRun

if TYPE_CHECKING:
    from launcher.client import Session
    from tests.support.lived import Lives
    from tests.support.played_sky import PlayedSky
    from tests.support.staleness import Held, Pools

_MANY_FILES = 300


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """Where PYTHONDONTWRITEBYTECODE is set, each guardian and minder would compile its imports again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def children_stay() -> Iterator[None]:
    """A guardian that is run in this process ends all that runs below it: those are the tests' own lanes."""
    from launcher.teardown import guardian

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guardian, "_end_own_children", lambda: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def few_open_files() -> Iterator[None]:
    """A program's idle connections stay with it, and these programs are all one process.

    DSPy keeps what is asked outside a rollout for the whole process (`settings.trace`), with its LM and that
    one's session. Past 1,024 open files `select` refuses, which libraries ask. What is idle is opened again
    at need.
    """
    yield
    if (dspy := sys.modules.get("dspy")) is not None and dspy.settings.trace:
        dspy.settings.trace.clear()
    if len(os.listdir("/proc/self/fd")) < _MANY_FILES:
        return
    gc.collect()
    for client in [found for found in gc.get_objects() if type(found) is httpx.Client]:
        pool = getattr(client._transport, "_pool", None)
        for connection in [] if pool is None else list(pool.connections):
            if connection.is_idle():
                connection.close()


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
    if (compile_start := sys.modules.get("launcher.client.dspy.compile_start")) is not None:
        compile_start._compiles.clear()  # they are known by their run's address, and another may get its port


@pytest.fixture
def session(run: SmallRun) -> Session:
    """Of a program whose trajectories name rollouts that this run has not sampled."""
    run.refuse_empty = False
    return run.session()


@pytest.fixture
def held() -> Iterator[Held]:
    """Who is held is let go when the test is over."""
    from tests.support.staleness import Held

    it = Held()
    yield it
    it.set()


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    """Every pool of rollouts that is made."""
    from launcher.client.dspy import rollout_collector
    from launcher.client.dspy.rollout_pool import RolloutPool
    from tests.support.staleness import Pools

    found = Pools()

    class Kept(RolloutPool):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            found.append(self)

    monkeypatch.setattr(rollout_collector, "RolloutPool", Kept)
    return found


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lives:
    """Live a run: `live(acts={"serve": …}, command=[…], flags={…})`."""
    from tests.support.lived import Lives

    for name in [name for name in os.environ if name.startswith("LAUNCH_")]:
        monkeypatch.delenv(name)
    # A run of seconds is looked at more often than one of hours.
    monkeypatch.setattr("launcher.run.runtime_monitor._POLL_SECONDS", 0.1)
    monkeypatch.setattr("launcher.run.work._POLL_SECONDS", 0.05)
    monkeypatch.setattr("launcher.run.work._DRAW_EVERY_SECONDS", 0.2)
    return Lives(tmp_path)


@pytest.fixture(scope="session")
def played_sky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedSky]:
    """SkyPilot's own code in front of played providers; one for all tests, importing it takes seconds."""
    from tests.support.played_sky import PlayedSky

    played = PlayedSky(tmp_path_factory.mktemp("played"))
    yield played
    played.close()
