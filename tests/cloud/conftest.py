"""The rig, where there can be one; elsewhere its tests are skipped with the reason (in CI: they fail)."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cloud.rig import Rig, missing, rig_in
from tests.cloud.runtime_image import runtime_binds
from tests.cloud.timers import Timers

# Not under the test's own folder: its path may be too long for a socket's.
_SCRATCH = Path("/var/tmp")


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A test cloud and a laptop of this test's own."""
    _skip_where_there_can_be_none()
    with rig_in(_scratch()) as rig:
        yield rig


@pytest.fixture
def runtime_rig() -> Iterator[Rig]:
    """A rig whose machines have the runtime's environment on their image."""
    _skip_where_there_can_be_none()
    with rig_in(_scratch(), runtime_binds()) as rig:
        yield rig


@pytest.fixture(scope="module")
def shared_rig() -> Iterator[Rig]:
    """`runtime_rig`, the same for all tests of a file."""
    _skip_where_there_can_be_none()
    with rig_in(_scratch(), runtime_binds()) as rig:
        yield rig


@pytest.fixture(scope="session", autouse=True)
def timers(request: pytest.FixtureRequest) -> Iterator[Timers]:
    """What waits for SkyPilot's own minute begins with the first test of this folder; its tests come last."""
    selected = [item for item in request.session.items if item.get_closest_marker("ticks")]
    cases = [item.callspec.params["case"] for item in selected if isinstance(item, pytest.Function)]
    begun, scratch = Timers(), _scratch()
    try:
        if missing() is None:
            begun.begin(cases, scratch)
        yield begun
    finally:
        begun.close()
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture(autouse=True)
def _ticks_need_a_rig(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("ticks"):
        _skip_where_there_can_be_none()


def _skip_where_there_can_be_none() -> None:
    why = missing()
    if why is not None:
        pytest.skip(why)


def _scratch() -> Path:
    return _SCRATCH / f"slipway-rig-{secrets.token_hex(4)}"
