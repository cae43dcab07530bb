"""timer_setback.py: a machine whose runtime is dead does not end itself while it is copied from.

The machine is a folder behind a real ssh, with a timer's database as skylet makes it and the runtime's code.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from launcher.backends.ssh import timer_reset as module
from launcher.backends.ssh.results_download import ResultsDownload
from launcher.backends.ssh.timer_reset import resetting_timer
from launcher.base.errors import JobFailed, NotPulled
from launcher.base.home import Home
from launcher.records.records import RecordStore, RunRecord
from launcher.run import machine_from_plan
from launcher.teardown import take_down
from launcher.types.plan import Plan, RentedGpus
from runtime import autodown
from tests.support.environment import REPOSITORY
from tests.support.own_sshd import OwnSshd
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

LONG_AGO = 1.5
AN_HOUR = {"begun_at": 0.0, "deadline_seconds": 3600.0, "budget": None, "price_per_hour": 0.0}


@dataclass
class Unattended:
    """A rented run whose launch, guardian and runtime are gone; its machine's timer runs."""

    record: RunRecord
    store: RecordStore
    database: Path

    @property
    def active_at(self) -> float:
        """Since when the machine counts its idle minutes."""
        with contextlib.closing(sqlite3.connect(self.database)) as connection:
            (found,) = connection.execute("SELECT value FROM config WHERE key = 'autostop_last_active_time'")
        return float(found[0])

    def pull(self) -> object:
        """As `launch down` does, in a process that has only the record."""
        return take_down.pull(self.store, self.store.load(self.record.id))

    def limited(self, **limits: float | None) -> None:
        described = self.record.machine | {"limits": AN_HOUR | limits}
        self.store.update(self.record.id, machine=described)


@pytest.fixture
def unattended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Unattended:
    monkeypatch.setattr(module, "EVERY_SECONDS", 0.05)
    sshd = OwnSshd(tmp_path / "sshd")
    store = RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path / "home")}))
    code = sshd.home / "slipway-code" / "runtime"
    code.mkdir(parents=True)
    for name in ("__init__.py", "autodown.py"):
        shutil.copy(REPOSITORY / "runtime" / name, code / name)
    database = sshd.home / ".sky" / "skylet_config.db"
    database.parent.mkdir()
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE config (key TEXT PRIMARY KEY, value TEXT)")
        connection.execute("INSERT INTO config VALUES ('autostop_last_active_time', ?)", (str(LONG_AGO),))
    record = sshd.rented(store, "dev")
    (store.folder(record.id) / "machine").mkdir()
    return Unattended(record, store, database)


def _copying(monkeypatch: pytest.MonkeyPatch, copy: Callable[[], object]) -> None:
    """What a copy comes to, in the place of rsync."""
    monkeypatch.setattr(ResultsDownload, "run", lambda fetching: copy())


def test_g22_a_machine_whose_runtime_is_dead_does_not_end_itself_under_a_long_copy(
    unattended: Unattended, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[float] = set()

    def set_back_three_times() -> bool:
        seen.add(unattended.active_at)
        return len(seen) > 3

    _copying(monkeypatch, lambda: wait_until(set_back_three_times, what="it is set back over and over"))
    unattended.pull()
    assert max(seen) > time.time() - 3600


@pytest.mark.parametrize(
    "limits", [{}, {"deadline_seconds": None, "budget": 2.0}], ids=["deadline", "budget"]
)
def test_g22_past_deadline_or_budget_it_ends_itself_whatever_is_copied(
    unattended: Unattended, monkeypatch: pytest.MonkeyPatch, limits: dict[str, float | None]
) -> None:
    standing = unattended.record.machine["standing"] | {"price_per_hour": 12.0}
    unattended.record = replace(unattended.record, machine=unattended.record.machine | {"standing": standing})
    unattended.limited(**limits)
    _copying(monkeypatch, lambda: None)
    unattended.pull()
    assert not _setting_back() and unattended.active_at == LONG_AGO


def test_g29_a_machine_that_is_kept_for_its_results_is_there_at_the_next_try(
    unattended: Unattended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try says that somebody waits, whatever becomes of it: a full disk here, say."""
    unattended.limited(begun_at=time.time())

    def refuse() -> None:
        raise JobFailed("copying did not start", "No space left on device", None)

    _copying(monkeypatch, refuse)
    with pytest.raises(NotPulled):
        unattended.pull()
    wait_until(lambda: unattended.active_at > LONG_AGO, what="its timer is set back")


def test_g22_what_asking_the_machine_raises_is_no_trouble_of_the_copys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "EVERY_SECONDS", 0.0)
    asked: list[None] = []

    def unreachable() -> None:
        asked.append(None)
        raise JobFailed("machine cannot be reached by ssh", "no route to host", None)

    with resetting_timer(unreachable, lambda: True):
        wait_until(lambda: len(asked) > 3, what="it is asked again all the same")
    assert not _setting_back()


def test_g22_a_machine_is_let_go_with_the_copy_and_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.EVERY_SECONDS == autodown.RENEW_EVERY_SECONDS
    monkeypatch.setattr(module, "EVERY_SECONDS", 0.0)
    asked: list[None] = []
    with resetting_timer(lambda: asked.append(None), lambda: len(asked) < 2):
        wait_until(lambda: not _setting_back(), what="the limit is reached")
    assert len(asked) == 2


def test_g22_a_machine_knows_its_runs_limits_in_whatever_process(tmp_path: Path) -> None:
    home = Home.find({"LAUNCH_HOME": str(tmp_path)})
    store = RecordStore(home)
    record = store.create()
    gpus = RentedGpus("H100:4", ("aws",), 10, None, train_gpus=1, infer_gpus=3)
    plan = Plan("4×H100 on aws", "tiny", 27.52, 7200.0, 900.0, 20.0, gpus)
    machine = machine_from_plan.machine_for(plan, record, store, home)
    limits = machine.describe()["limits"]
    assert (limits["begun_at"], limits["deadline_seconds"], limits["budget"]) == (record.created, 7200, 20)
    again = machine_from_plan.machine_of(store.update(record.id, machine=machine.describe()), store, home)
    assert again.describe() == machine.describe()


def _setting_back() -> list[threading.Thread]:
    """Who sets a timer back now."""
    return [thread for thread in threading.enumerate() if thread.name == "timer-setback"]
