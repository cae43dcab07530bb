"""The link to a machine: a real sshd in namespaces of its own, a real ssh, killed, frozen and deceived."""

from __future__ import annotations

import pytest

from tests.cloud.rig import Rig

pytestmark = pytest.mark.slow


def _in_trouble(rig: Rig, how: str) -> str:
    return rig.run_program("troubled_link.py", how)


def _figure(said: str, name: str) -> float:
    return float(said.split(f"{name}=")[1].split()[0])


def test_a_frozen_link_is_noticed_and_mended(shared_rig: Rig) -> None:
    assert _figure(_in_trouble(shared_rig, "frozen"), "mended") <= 60


def test_a_killed_link_is_mended_at_once(shared_rig: Rig) -> None:
    assert _figure(_in_trouble(shared_rig, "killed"), "slowest") <= 15


def test_g15_a_swapped_host_key_is_refused_with_a_hint(shared_rig: Rig) -> None:
    said = _in_trouble(shared_rig, "swapped")
    assert "may be a different machine: its host key has changed | launch down" in said
    assert "again: " in said and said.count("host key has changed") == 2
