"""The budget is the run's, over all its lives: what earlier ones cost is spent; nothing left is refused."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launcher.backends.cloud_machine import CloudMachine
from launcher.base import clock
from launcher.base.errors import PreflightError, UsageError
from launcher.base.home import Home
from launcher.base.log import close_log
from launcher.cli import run_outcome
from launcher.config import resume_source
from launcher.config.price_agreement import table
from launcher.config.setting_sources import load
from launcher.console.output import Output
from launcher.records.lives import Life
from launcher.records.records import RecordStore, RunRecord
from launcher.run import launching, machine_from_plan
from launcher.teardown import take_down
from launcher.types.machine import Machine
from launcher.types.plan import Plan, RentedGpus, make_plan
from tests.support.committed import commit
from tests.support.pretend_machine import PretendMachine

BUDGET = 40.0
# In US dollars per hour: two dollars last for 0.6 s.
PRICE = 12_000.0

Resume = Callable[..., tuple[int, str]]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home", tmp_path / "config", tmp_path / "cache")


@pytest.fixture
def store(home: Home) -> RecordStore:
    return RecordStore(home)


def run_that_cost(store: RecordStore, home: Home, spent: float, lives: int) -> RunRecord:
    """A run named dev with a step and a budget, which is over; its lives have cost so much together."""
    begun = load({}, environ={}, folder=home.data.parent, home=home)
    details = resume_source.record_details(begun, "/models/mine")
    details["settings"]["budget"] = BUDGET
    record = store.create(name="dev", command=("true",), details=details)
    commit(store.folder(record.id) / "machine", 2)
    now = time.time()
    machine = {"kind": "pretend", "standing": {"price_per_hour": spent / lives}}
    earlier = tuple(Life(now - 9000, now - 5400, spent / lives) for _ in range(lives - 1))
    ended = {"state": "verified", "begun": now - 3600, "ended": now, "launch": None}
    return store.update(record.id, machine=machine, earlier_lives=earlier, **ended)


@pytest.fixture
def resume(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resume:
    """`launch --resume dev` to the end of its set-up, on a machine of that price; its code and its words."""

    def set_up() -> None:
        time.sleep(5.0)  # the alarm of the limit ends it, or nothing does
        raise PreflightError("the set-up came to its end", "nothing ended it before", None)

    def again(**flags: Any) -> tuple[int, str]:
        machine = PretendMachine(tmp_path / "machine", {"setup": set_up}, PRICE)
        with monkeypatch.context() as patch:
            patch.setattr(Home, "find", lambda: home)
            patch.setattr(launching.request_validation, "validate", lambda *_: "/models/mine")
            patch.setattr(
                launching.pricing,
                "make_priced_plan",
                lambda settings, say: replace(make_plan(settings), price_per_hour=PRICE),
            )
            patch.setattr(launching.machine_from_plan, "machine_for", lambda *_, **__: machine)
            stderr = io.StringIO()
            output = Output(as_json=True, stdout=io.StringIO(), stderr=stderr, environ={})
            code = launching.launch_run({"resume": "dev", "port": None, **flags}, (), None, (), output)
            close_log()
        return code, stderr.getvalue()

    return again


@pytest.mark.process
def test_p12_a_life_ends_when_the_lives_together_have_spent_the_budget(
    resume: Resume, store: RecordStore, home: Home
) -> None:
    run_that_cost(store, home, spent=38.0, lives=2)
    code, said = resume()
    assert code == 7 and "the budget of $40.00 is spent" in said, said
    cost = sum(life.cost(time.time()) for life in store.load("dev").lives[:2])
    assert cost == pytest.approx(38.0)


@pytest.mark.process
def test_p12_a_resume_with_nothing_left_is_refused_before_anything_is_rented(
    resume: Resume, store: RecordStore, home: Home
) -> None:
    record = run_that_cost(store, home, spent=40.5, lives=3)
    with pytest.raises(UsageError) as refused:
        resume()
    assert refused.value.exit_code == 2 and "the budget of dev is spent" in refused.value.message
    assert "$40.00 for all of its lives, which have cost $40.50" in str(refused.value.why)
    assert refused.value.hint == "launch --resume dev --budget 81"
    assert store.load(record.id) == record, "nothing was begun"


def test_p12_plan_and_agreement_show_what_is_left() -> None:
    gpus = RentedGpus("H100:4", ("aws",), 10, None, train_gpus=1, infer_gpus=3)
    fresh = Plan("4×H100 on aws", "tiny", 27.52, None, 900.0, BUDGET, gpus)
    plan = replace(fresh, spent=27.5)
    assert "budget $40.00, $12.50 of it left" in plan.describe()
    assert "budget $40.00, $12.50 of it left" in table(plan)
    assert fresh.max_cost is not None and plan.max_cost is not None
    assert fresh.max_cost - plan.max_cost == pytest.approx(27.5)


def test_p12_nothing_keeps_a_machine_past_the_budget_of_all_lives(store: RecordStore, home: Home) -> None:
    gpus = RentedGpus("H100:4", ("aws",), 10, None, train_gpus=1, infer_gpus=3)
    plan = Plan("4×H100 on aws", "tiny", 27.52, None, 900.0, BUDGET, gpus, spent=38.0)
    machine: Machine = machine_from_plan.machine_for(plan, store.create(), store, home)
    assert machine.describe()["limits"]["spent"] == 38.0, "its timer is set back no longer than that"

    details = {"plan": {"budget": BUDGET}}
    now = time.time()
    twenty_minutes = {"begun": now - 1200, "machine": {"standing": {"price_per_hour": 12.0}}}
    first = (Life(0.0, 3600.0, 35.0),)
    within = RunRecord("slip-01234567", 0.0, details=details, earlier_lives=first, **twenty_minutes)
    past = replace(within, earlier_lives=(*first, *first))
    assert take_down.limit_reached(within, now) is None
    assert take_down.limit_reached(past, now) == "the budget of $40.00 is spent"


@pytest.mark.parametrize("hours", [6, -6], ids=["forward", "back"])
def test_p13_a_wall_clock_that_is_set_in_mid_run_moves_no_limit(
    hours: int, store: RecordStore, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else unpulled results would be given up, or a machine kept past its deadline."""
    gpus = RentedGpus("H100:4", ("aws",), 10, None, train_gpus=1, infer_gpus=3)
    plan = Plan("4×H100 on aws", "tiny", 27.52, 3600.0, 900.0, None, gpus)
    record = store.create(details={"plan": {"deadline_seconds": 3600.0}})
    machine = cast("CloudMachine", machine_from_plan.machine_for(plan, record, store, home))
    real, boot = time.time, clock.boot_seconds
    monkeypatch.setattr(time, "time", lambda: real() + hours * 3600)
    record = store.load(record.id)
    assert take_down.limit_reached(record, record.now()) is None and machine._within_limits()
    assert 0 <= run_outcome.seconds(record) < 60, "nor the duration that is shown"
    monkeypatch.setattr(clock, "boot_seconds", lambda: boot() + 3700)
    assert take_down.limit_reached(record, record.now()) == "the deadline of 1h is reached"
    assert not machine._within_limits()


def test_p13_after_a_reboot_from_elsewhere_or_in_wsl_the_wall_clock_is_all_there_is(
    store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = store.create()
    assert record.place is not None
    for place in (None, replace(record.place, boot="another"), replace(record.place, boot=None)):
        assert replace(record, place=place).now() == pytest.approx(time.time(), abs=5)
    later = clock.boot_seconds() - 3600  # as if Windows had slept for an hour
    release = SimpleNamespace(release="5.15.167.4-microsoft-standard-WSL2")
    monkeypatch.setattr(os, "uname", lambda: release)
    monkeypatch.setattr(clock, "boot_seconds", lambda: later)
    assert record.now() == pytest.approx(time.time(), abs=5)
