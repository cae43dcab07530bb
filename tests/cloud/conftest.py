"""The rig, where there can be one; elsewhere its tests are skipped with the reason (in CI: they fail)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cloud.rig import Rig, missing, rig_in

# Not under the test's own folder: that may be in /tmp, which machines and sockets' short names need free.
_SCRATCH = Path("/var/tmp")


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A test cloud and a laptop of this test's own."""
    why = missing()
    if why is not None:
        pytest.skip(why)
    with rig_in(_SCRATCH / f"slipway-rig-{secrets.token_hex(4)}") as rig:
        yield rig
