"""The rented machine's own timer, on real SkyPilot: set back while the runtime answers, run out when it does
not, or when nobody is left. Skylet looks once a minute: `timers.py` lets that pass beside other tests."""

from __future__ import annotations

import pytest

from tests.cloud.timers import Timers

pytestmark = [pytest.mark.slow, pytest.mark.ticks]


@pytest.mark.parametrize("case", ["laptop lost"])
def test_g04_an_armed_machine_ends_itself_when_everything_of_the_laptop_is_gone(
    timers: Timers, case: str
) -> None:
    seconds, bound = timers[case].seconds_until_gone()
    assert 0 < seconds <= bound


@pytest.mark.parametrize("case", ["frozen"])
def test_g04_a_busy_run_outlives_its_idle_minutes_and_a_frozen_one_does_not(
    timers: Timers, case: str
) -> None:
    seconds, bound = timers[case].seconds_until_gone()
    assert 0 < seconds <= bound
