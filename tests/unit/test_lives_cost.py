"""What a run has cost, as `launch status` says it: over all its lives, until it is proven to be down."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from launcher.records import heartbeat
from launcher.records.records import RecordStore
from tests.support import recorded_machine
from tests.support.left_alone import PRICE, left_alone, store, there, typed
from tests.support.typed import Typed

__all__ = ["store", "there", "typed"]

pytestmark = pytest.mark.process


def test_g06_a_run_that_is_taken_up_costs_what_its_lives_cost(
    typed: Typed, store: RecordStore, there: Path
) -> None:
    record = left_alone(store, there, ago=96 * 3600.0)
    an_hour_later = store.load(record.id).life.begun + 3600.0
    store.update(record.id, state="verified", ended=an_hour_later, ended_by="launch")
    store.reopen(record.id)
    store.update(record.id, state="work", machine=recorded_machine.describe(there, PRICE))
    (described,) = json.loads(typed("status", "--json").stdout)["runs"]
    assert 12.0 <= described["cost"] < 13.0, "one hour of the first life, and a moment of this one"
    first, second = described["lives"]
    assert first["price_per_hour"] == second["price_per_hour"] == PRICE
    assert first["ended"] - first["begun"] == pytest.approx(3600.0)
    assert second["ended"] is None and time.time() - second["begun"] < 1000
    shown = typed("status", "dev").stdout
    assert "$0.0" in shown and "so far, $12.0" in shown and "since its first start" in shown
    assert "since start number 2, 1h" in shown
    _, row = typed("status").stdout.splitlines()
    assert "4d" not in row.replace(record.id, ""), "its time is its second life's"


def test_g06_what_is_not_proven_to_be_down_goes_on_costing(
    typed: Typed, store: RecordStore, there: Path
) -> None:
    record = left_alone(store, there, ago=7200.0)
    store.update(record.id, state="unverified", ended=time.time() - 3600.0)
    (described,) = json.loads(typed("status", "--json").stdout)["runs"]
    assert described["cost"] == pytest.approx(2 * PRICE, abs=0.5)


@pytest.mark.parametrize("seen", ["gone", "gone, seen later", "still listed"])
def test_p12_a_machine_that_ended_itself_cost_nothing_until_somebody_looked(
    typed: Typed, store: RecordStore, there: Path, seen: str
) -> None:
    """Its computer died on Friday, and whoever ends the run on Monday is told that the machine is gone."""
    record = left_alone(store, there, ago=66 * 3600.0, lease_seconds=900.0)
    store.update(record.id, machine=record.machine | {"idle_minutes": 10})
    heard = time.time() - 65 * 3600.0
    beat = store.folder(record.id) / heartbeat.FILE
    beat.touch()
    os.utime(beat, (heard, heard))
    if seen != "still listed":
        (there / "gone").touch()
    if seen == "gone, seen later":  # somebody looked at the machine, which renewed its lease
        (store.folder(record.id) / "machine").mkdir()
        look = store.folder(record.id) / "machine" / "trainer.json"
        look.touch()
        os.utime(look, (heard + 7200, heard + 7200))
    typed("down", "dev")
    record, own_end = store.load(record.id), heard + 900 + 600 + 90
    ended = {"gone": own_end, "gone, seen later": own_end + 7200, "still listed": time.time()}[seen]
    assert record.state == "verified" and record.ended == pytest.approx(ended, abs=120.0)
    (described,) = json.loads(typed("status", "--json").stdout)["runs"]
    assert described["cost"] == pytest.approx(PRICE * (ended - record.life.begun) / 3600, abs=0.5)
