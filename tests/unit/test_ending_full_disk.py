"""launcher/run/ending.py on a home that is full from some phase on: a real file system of 512 KiB.

`test_ending_record.py` has the same with a real guardian and a real program, where it fills up in one.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.pretend_calls import PHASES
from tests.support.small_disk import said_on_small_disk

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """How the runs were, by the phase in which the disk was full; where this user may mount a small one."""
    return said_on_small_disk("fill_small_disk.py", tmp_path_factory.mktemp("small"))


def test_g27_on_a_full_disk_nothing_is_begun(lives: dict[str, dict[str, Any]]) -> None:
    said = lives["before"]
    assert said["full_bytes"] > 0
    assert (said["code"], said["asked"], said["state"]) == (3, [], None)


@pytest.mark.parametrize("phase", PHASES[:-1])
def test_g27_a_disk_that_is_full_from_some_phase_on_stops_no_end(
    lives: dict[str, dict[str, Any]], phase: str
) -> None:
    said, at = lives[phase], PHASES.index(phase)
    assert said["full_bytes"] > 0, "the disk was full"
    assert said["code"] == (8 if phase == "pull" else 3), said["stderr"]
    assert "Traceback" not in said["stderr"]
    assert ("pull" in said["asked"]) == (at >= PHASES.index("serve"))
    assert said["asked"][-2:] == ["down", "proof"]
    # Nobody says that it is down while nobody could write so; and who could, later, was not let go.
    assert said["state"] == phase and not said["let_go"]
    assert (said["state_later"], said["ended_by"]) == ("verified", "gc" if phase == "created" else "guardian")
    assert said["at_home"] == (phase in ("work", "pull", "down"))
