"""The rig, where there can be one; elsewhere its tests are skipped with the reason (in CI: they fail)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cloud.rig import Rig, missing, rig_in
from tests.cloud.runtime_image import runtime_binds

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


def _skip_where_there_can_be_none() -> None:
    why = missing()
    if why is not None:
        pytest.skip(why)


def _scratch() -> Path:
    return _SCRATCH / f"slipway-rig-{secrets.token_hex(4)}"
