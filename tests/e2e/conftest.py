"""Homes for real runs, whose caches are the user's own (environments are built once), and one endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.base.home import Home
from tests.support.launched import Launched, processes_of
from tests.support.ports import free_port
from tests.support.waiting import wait_until
from tests.support.warm import warm_environment


def make_home(folder: Path) -> Path:
    """A LAUNCH_HOME of its own whose cache is the user's, with an environment that is ready."""
    warm_environment()
    cache = Home.find().cache
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cache").symlink_to(cache, target_is_directory=True)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path / "home")


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """`launch` without a command, held until the tests are over; then Ctrl-C, and nothing may be left."""
    yield from _held(tmp_path_factory.mktemp("endpoint") / "home")


@pytest.fixture(scope="session")
def pupil(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """Another one, for tests that train its policy away from what the others ask of it; ART's among them."""
    yield from _held(tmp_path_factory.mktemp("pupil") / "home", "--art")


def _held(folder: Path, *options: str) -> Iterator[Launched]:
    launched = Launched(make_home(folder), ["--name", "shared", "--port", str(free_port()), *options])
    try:
        launched.wait_for_text("ready: http", 900)
        yield launched
        launched.interrupt()
        assert launched.wait(900) == 130
        wait_until(lambda: not processes_of(launched.run_id), 10, "no process of the run is left")
    finally:
        if launched.process.poll() is None:
            launched.kill_tree()
