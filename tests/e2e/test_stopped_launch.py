"""`launch` itself stopped under clients with short time-outs, and a real step on what they were answered.

Twenty rounds of it, at several delays: `python -m tests.bench.receipts_storm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.bench.receipts_storm import CLIENTS, Storm
from tests.support.launched import Launched
from tests.support.waiting import SOONEST_SECONDS, wait_until

pytestmark = pytest.mark.slow

# So often each client that waits has asked again before `launch` goes on: 12 s, by time-outs of 5.
TRIES_MEANWHILE = 2


@pytest.fixture
def storm(endpoint: Launched) -> Iterator[Storm]:
    with closing(Storm(endpoint, "shared")) as storm:
        yield storm


def test_c52_forty_clients_of_a_launch_that_stood_still_train_what_they_were_answered(storm: Storm) -> None:
    def until_stopped() -> None:
        wait_until(lambda: storm.waiting < CLIENTS, what="the first answer", rarest_seconds=SOONEST_SECONDS)

    def until_resumed() -> None:
        asked = storm.requests + TRIES_MEANWHILE * storm.waiting
        wait_until(lambda: storm.requests >= asked, what="all that wait have asked again, and again")

    seen = storm.round(until_stopped, until_resumed)
    assert not seen.problems, seen
    assert seen.requests > CLIENTS and seen.unreceived, f"nothing was on its way when it stopped: {seen}"
