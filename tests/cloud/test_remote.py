"""A run's folder on a machine: set up, served, seen and copied over a real ssh; the runtime has no engine."""

from __future__ import annotations

import re

import pytest

from runtime import metadata_shield
from tests.cloud.rig import Rig

pytestmark = pytest.mark.slow


def test_g14_a_runtime_is_served_over_ssh_with_secrets_that_are_nowhere_and_no_way_to_the_metadata_service(
    runtime_rig: Rig,
) -> None:
    said = runtime_rig.run_program("serve_over_ssh.py")
    print(said)
    assert "the runtime reaches [], skylet's user ['169.254.169.254']" in said
    assert "ended 0: it was told to end" in said
    # Where there is no sudo it is said, in one line, and the runtime runs all the same.
    (line,) = re.findall(f"{metadata_shield.REACHABLE}.*", said)
    assert "169.254.169.254" in line and "sudo" in line
    assert "it runs" in said
