"""The provider: machines behind instances, faults on demand, and a witness that saw it all."""

from __future__ import annotations

import pytest

from tests.cloud.rig import Rig

pytestmark = pytest.mark.slow


def test_faults_come_and_go_and_the_witness_saw_them(rig: Rig) -> None:
    said = rig.run_program("try_faults.py")
    assert said.endswith("done\n")
    ran = [one["id"] for one in rig.witness("run")]
    first, second, third, fourth = ran
    refusals = ["describe-refused", "terminate-refused", "run-refused", "run-answer-lost"]
    assert [len(rig.witness(event)) for event in refusals] == [1, 1, 1, 1]
    assert [one["id"] for one in rig.witness("lost")] == [second]
    assert [one["id"] for one in rig.witness("terminate")] == [first, third]
    # What costs money: the machine that broke, and the one whose making was answered with an error.
    assert rig.alive() == [second, fourth]
