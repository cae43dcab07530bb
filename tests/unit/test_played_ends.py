"""What `launch down` and `launch gc` conclude from what GCP, Lambda and RunPod answer.

The end of a run is the whole of ours: record, machine, teardown, SkyPilot's code and the providers' lists.
The providers are played as in test_played_lists.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.backends import cloud_machine
from launcher.backends.cloud_machine import CloudMachine
from launcher.backends.skypilot import cluster_teardown, orphaned_machines, standby_home
from launcher.backends.skypilot.orphaned_machines import OrphanReport
from launcher.base.errors import TeardownUnverified
from launcher.base.home import Home
from launcher.records.records import RecordStore, RunRecord
from launcher.teardown import rented_leftovers
from launcher.teardown.leftovers import Leftover
from launcher.teardown.take_down import take_down
from tests.support import played_gcp, played_lambda
from tests.support.environment import PROGRAMS
from tests.support.played_https import Answer, Played
from tests.support.played_sky import PlayedSky, on_cloud

pytestmark = pytest.mark.process

# Several places of a cloud, as a price list has them.
PLACES = {
    "gcp": ["gcp/us-central1", "gcp"],
    "lambda": ["lambda/us-east-1", "lambda/us-west-1"],
    "runpod": ["runpod/CA", "runpod/US"],
}
_UP = {"gcp": "RUNNING", "lambda": "active", "runpod": "RUNNING"}
# Not up, and not gone: still paid for.
_STOPPED = {"gcp": "TERMINATED", "lambda": "unhealthy", "runpod": "EXITED"}
# What a machine may be shown as when it has been ended.
_ENDED_AS = {"gcp": "DEPROVISIONING", "lambda": "terminating", "runpod": "TERMINATED"}
_DENIED = {
    "gcp": Answer(played_gcp.error(403, "forbidden", "Required permission"), 403),
    "lambda": Answer(played_lambda.REFUSED, 403),
    "runpod": Answer({"errors": [{"message": "Forbidden"}], "data": None}),
}
_NOT_FOUND = {
    "gcp": Answer(
        played_gcp.error(404, "notFound", "The resource 'projects/p/zones/z/instances/i' was not found"),
        404,
    ),
    "lambda": Answer(played_lambda.NOT_FOUND, 404),
    "runpod": Answer({"errors": [{"message": "pod not found to terminate"}], "data": None}),
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, played_sky: PlayedSky) -> RecordStore:
    """Runs of a home whose clouds are the played ones. Nobody waits a minute for what never comes."""
    monkeypatch.setenv("HOME", str(played_sky.user_home))
    for module in (cloud_machine, standby_home, orphaned_machines):
        for name, kept in (("SkyHome", played_sky.home), ("SkyProcess", played_sky.sky)):
            if hasattr(module, name) and (module, name) != (standby_home, "SkyHome"):
                monkeypatch.setattr(module, name, lambda *arguments, kept=kept, **named: kept)
    for name, seconds in (("_POLL_SECONDS", 0.01), ("_SETTLE_SECONDS", 0.02), ("GONE_SECONDS", 0.5)):
        monkeypatch.setattr(cluster_teardown, name, seconds)
    for name in ("LIST_SECONDS", "DOWN_SECONDS"):
        monkeypatch.setattr(cluster_teardown, name, 300.0)
    return RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path / "home")}))


@pytest.fixture(params=sorted(PLACES))
def played(request: pytest.FixtureRequest, played_sky: PlayedSky) -> Played:
    """Each of the providers, as new."""
    played_sky.new_cluster()
    return played_sky.played[request.param]


def name_of(played: Played) -> str:
    return next(name for name in PLACES if played.__class__.__name__.lower() == f"played{name}")


def left_behind(store: RecordStore, cloud: str) -> RunRecord:
    """A run that nobody looks after, which had asked this cloud for a machine; SkyPilot's books are lost."""
    record = store.create(name=None)
    machine = CloudMachine(
        record.id, store.folder(record.id) / "machine", infra=PLACES[cloud], gpus="H100:1", idle_minutes=10
    )
    return store.update(record.id, state="work", machine=machine.describe() | {"asked": True})


def cluster_of(record: RunRecord) -> str:
    return on_cloud(record.id)


def test_g07_a_machine_that_is_up_is_ended_once_and_then_proven_gone(
    store: RecordStore, played: Played
) -> None:
    record = left_behind(store, name_of(played))
    played.add_machine(cluster_of(record), _UP[name_of(played)])
    ended = take_down(store, record, "down")
    assert (ended.state, played.machines(), played.count(played.ending)) == ("verified", [], 1)
    assert "is listed by" in str(ended.proof)


def test_g07_a_machine_that_is_stopped_is_ended_as_well(store: RecordStore, played: Played) -> None:
    record = left_behind(store, name_of(played))
    played.add_machine(cluster_of(record), _STOPPED[name_of(played)])
    assert take_down(store, record, "gc").state == "verified"
    assert (played.machines(), played.count(played.ending)) == ([], 1)


def test_g07_what_is_still_shown_of_an_ended_machine_is_no_machine(
    store: RecordStore, played: Played
) -> None:
    record = left_behind(store, name_of(played))
    machine = played.add_machine(cluster_of(record), _UP[name_of(played)])
    played.ends_as = _ENDED_AS[name_of(played)]
    assert take_down(store, record, "down").state == "verified"
    assert (played.machines(), played.count(played.ending)) == ([machine], 1)


def test_g07_a_machine_that_the_books_forgot_is_ended_once(
    store: RecordStore, played: Played, played_sky: PlayedSky
) -> None:
    """The record says where it was, the places say where it may be: for its provider that is one machine."""
    record = left_behind(store, name_of(played))
    standing = played_sky.launch(record.id, PLACES[name_of(played)][0])
    played_sky.sky.call("down", 300.0, cluster=record.id, by_server=False)
    assert played.machines() == []
    record = store.update(record.id, machine=record.machine | {"standing": standing})
    played.add_machine(cluster_of(record), _UP[name_of(played)])
    played.ends_as = _ENDED_AS[name_of(played)]
    played.asked.clear()
    ended = take_down(store, record, "down")
    assert (ended.state, played.count(played.ending)) == ("verified", 1)


def test_p18_the_key_that_os_login_keeps_of_a_run_goes_with_the_proof_of_its_end(
    store: RecordStore, played_sky: PlayedSky
) -> None:
    """SkyPilot adds it, and would leave it. A key of the user's own stays."""
    record = left_behind(store, "gcp")
    played_sky.new_cluster()
    gcp, kept = played_sky.gcp, played_sky.proxy.ca.parent / "bin" / "gcloud.keys"
    gcp.os_login = True
    kept.write_text("ssh-rsa AAAAB3own somebody\n")
    standing = played_sky.launch(record.id, "gcp")
    assert len(kept.read_text().splitlines()) == 2
    record = store.update(record.id, machine=record.machine | {"standing": standing})
    gcp.fail(gcp.listing, _DENIED["gcp"])
    with pytest.raises(TeardownUnverified):
        take_down(store, record, "down")
    assert len(kept.read_text().splitlines()) == 2, "its machine may be there"
    gcp.faults.clear()
    assert take_down(store, store.load(record.id), "down").state == "verified"
    assert kept.read_text() == "ssh-rsa AAAAB3own somebody\n"
    kept.unlink()


def test_g01_an_end_without_a_server_signals_nobody_whose_pid_an_earlier_request_had(
    played_sky: PlayedSky,
) -> None:
    """The computer went off while SkyPilot launched; its process ids are other processes' now."""
    cluster = played_sky.new_cluster()
    played_sky.launch(cluster, "lambda")
    with subprocess.Popen(["sleep", "600"]) as stranger:
        try:
            program = [
                sys.executable,
                str(PROGRAMS / "unit" / "leave_request.py"),
                cluster,
                str(stranger.pid),
            ]
            subprocess.run(program, env=played_sky.home.environ(), cwd=played_sky.home.folder, check=True)
            assert played_sky.sky.call("down", 300.0, cluster=cluster, by_server=False) == {"known": True}
            assert stranger.poll() is None and played_sky.lambda_.machines() == []
        finally:
            stranger.kill()


def test_g07_a_machine_that_is_gone_is_not_asked_to_end(store: RecordStore, played: Played) -> None:
    record = left_behind(store, name_of(played))
    assert take_down(store, record, "down").state == "verified"
    assert played.count(played.listing) >= 1 and played.count(played.ending) == 0


def test_g07_a_list_that_is_refused_is_no_proof(store: RecordStore, played: Played) -> None:
    record = left_behind(store, name_of(played))
    machine = played.add_machine(cluster_of(record), _UP[name_of(played)])
    played.fail(played.listing, _DENIED[name_of(played)])
    with pytest.raises(TeardownUnverified):
        take_down(store, record, "down")
    assert (store.load(record.id).state, played.machines()) == ("unverified", [machine])
    played.faults.clear()
    assert take_down(store, store.load(record.id), "gc").state == "verified", "the next try has the list"


@pytest.mark.parametrize("answers", [_DENIED, _NOT_FOUND], ids=["denied", "not found"])
def test_g07_what_a_provider_says_of_the_end_proves_nothing_its_list_does(
    store: RecordStore, played: Played, answers: dict[str, Answer]
) -> None:
    """Also "not found": as long as the list has the machine, it is there."""
    record = left_behind(store, name_of(played))
    machine = played.add_machine(cluster_of(record), _UP[name_of(played)])
    played.fail(played.ending, answers[name_of(played)])
    with pytest.raises(TeardownUnverified) as refused:
        take_down(store, record, "down")
    assert store.load(record.id).state == "unverified"
    assert machine in str(refused.value.why)


def looked(store: RecordStore, cloud: str) -> tuple[list[Leftover], OrphanReport, list[str]]:
    """What `launch gc` is told of a cloud, and what it says beside."""
    notes: list[str] = []
    home = Home.find({"LAUNCH_HOME": str(store.runs.parent)})
    return *rented_leftovers.find_rented_leftovers(home, [cloud], notes.append), notes


def test_p08_gc_finds_what_runs_of_this_home_left_at_every_cloud_whose_list_can_be_asked(
    store: RecordStore, played: Played
) -> None:
    """The record says that its run is over, the provider's list has a machine of it."""
    record = store.update(left_behind(store, name_of(played)).id, state="verified")
    cluster = f"{record.id}-{record.id.removeprefix('slip-')}"
    machine = played.add_machine(cluster, _UP[name_of(played)])
    played.add_machine("somebody-elses", _UP[name_of(played)])
    (found,), seen, _ = looked(store, name_of(played))
    assert (found.kind, found.run_id) == ("machine", record.id) and machine in found.what
    assert found.why.startswith("the run is over") and "costs money" in found.why
    assert seen.unasked == {} and len(seen.answered) == 1
    assert "no longer lists it" in found.remove()
    assert machine not in played.machines() and len(played.machines()) == 1
    assert looked(store, name_of(played))[0] == []


def test_p08_a_machine_of_which_nothing_says_whose_it_is_is_named_and_left_alone(
    store: RecordStore, played: Played
) -> None:
    machine = played.add_machine("slip-0a0b0c0d-0a0b0c0d", _UP[name_of(played)])
    played.add_machine("slip-0a0b0c0e-0a0b0c0e", _ENDED_AS[name_of(played)])
    found, seen, notes = looked(store, name_of(played))
    assert (found, seen.unasked) == ([], {})
    (said,) = [line for line in notes if machine in line]
    assert "slip-0a0b0c0d" in said and "left alone" in said and "slip-0a0b0c0e" not in str(notes)
    if name_of(played) != "gcp":  # where a label would say it
        assert "no label says whose it is" in said and "console" in said


def test_p08_a_cloud_that_refuses_its_list_is_named_as_unasked(store: RecordStore, played: Played) -> None:
    played.fail(played.listing.replace("instances ", r"(aggregated/)?instances "), _DENIED[name_of(played)])
    found, seen, notes = looked(store, name_of(played))
    assert found == [] and list(seen.unasked) == [name_of(played)] and not seen.answered
    assert f"{name_of(played)} was not asked" in notes[0]
