"""Rented runs whose link is cut late, whose results come home slowly, and whose results do not come home.

Two runs on one laptop: the second one comes up while the first one's request grows old. SkyPilot, sshd, ssh,
rsync and signals are real; the runtime has no engine, and the waits of `launch` are those of
`launch_hasty.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cloud.launched import RENTED, Launched, collect, running
from tests.cloud.matrix import UP_SECONDS, small_code
from tests.cloud.rig import REPOSITORY, Finished, Rig
from tests.support.environment import PROGRAMS
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

_HASTY = (sys.executable, str(PROGRAMS / "cloud" / "launch_hasty.py"))
_WORK = (sys.executable, str(PROGRAMS / "cloud" / "work_when_told.py"))
# The patience as well.
_LEASE_SECONDS = 30
# So long `down` of `launch_hasty.py` waits for an end to begin: a copy takes longer.
_ORDERLY_SECONDS = 10.0
# Of each of the four large files of a checkpoint: 20 s by `slow_rsync.sh`.
_LARGE_BYTES, _SMALL_BYTES = 10_000_000, 2000
_SOON_SECONDS = 300.0
_COPYING = "copying results: "
_KEPT = "stuck is kept: its newest results could not be copied"


@pytest.fixture(scope="module")
def asking(shared_rig: Rig) -> Launched:
    """A run that is ready; its program asks, and is not answered for now. What it trains comes home with the
    end only."""
    words = ["--lease", f"{_LEASE_SECONDS}s", "--copy-rate", "100kB/s"]
    launched = _launch(shared_rig, "asking", *words, "--", *_WORK, str(_LARGE_BYTES), "ask")
    launched.wait_for("ready: http", UP_SECONDS)
    return launched


@pytest.fixture(scope="module")
def stuck(shared_rig: Rig) -> Launched:
    """A run on its way up."""
    return _launch(shared_rig, "stuck", "--lease", "10m", "--", *_WORK, str(_SMALL_BYTES))


def test_g17_a_request_older_than_the_patience_survives_a_link_that_is_cut(
    shared_rig: Rig, asking: Launched, stuck: Launched
) -> None:
    there = _on_its_machine(shared_rig, asking)
    wait_until(lambda: _asked(there), _SOON_SECONDS, lambda: f"a question\n{asking.text}")
    asked_at = time.monotonic()
    wait_until(lambda: time.monotonic() - asked_at > _LEASE_SECONDS + 1, 3 * _LEASE_SECONDS, "it to grow old")
    assert len(_asked(there)) == 1 and "answered" not in asking.text, asking.text

    links = [pid for pid, line in running(shared_rig, "ssh -N -n -T").items() if asking.run.name in line]
    assert links
    for pid in links:
        os.kill(pid, signal.SIGKILL)
    wait_until(
        lambda: len(_asked(there)) > 1 or "answered" in asking.text,
        _SOON_SECONDS,
        lambda: f"the same question once more\n{asking.text}",
    )
    (there / "released").touch()
    asking.wait_for("answered ", _SOON_SECONDS)
    code, seconds, patience = wait_until(lambda: _answered(asking), what=lambda: asking.text)
    print(f"cut after {_LEASE_SECONDS} s and more; answered {code} after {seconds:.1f} s")
    assert code == 200, asking.text
    assert seconds > patience == _LEASE_SECONDS
    assert len(set(_asked(there))) == 1
    said = [json.loads(line) for line in (there / "answers.jsonl").read_text().splitlines()]
    assert [one["request"] for one in said].count(_asked(there)[0]) == 1


def test_g28_down_during_a_long_copy_waits_for_it_and_the_provider_is_asked_once(
    shared_rig: Rig, asking: Launched
) -> None:
    rig, results = shared_rig, asking.run / "results"
    there = _on_its_machine(rig, asking)
    (there / "released").touch()
    _by_ssh(
        rig,
        "asking",
        "sudo mv /usr/bin/rsync /usr/bin/rsync.whole"
        " && sudo install /opt/rig/inside/slow_rsync.sh /usr/bin/rsync",
    )
    (results / "train").touch()
    asking.wait_for("trained 1: published", _SOON_SECONDS)
    machine, made = _machine(rig, asking), _sha256(there / "checkpoints" / "step-000001")
    metrics = (there / "metrics.jsonl").read_bytes()
    logs = {path.name: path.read_bytes() for path in (there / "logs").glob("*.log")}

    downs = [_down(rig, "asking")]
    wait_until(
        lambda: _doing(asking).startswith(_COPYING),
        _SOON_SECONDS,
        lambda: f"the copy\n{asking.text}\n{downs[0].text}",
    )
    copying_at = time.time()
    assert machine in rig.alive()
    downs.append(_down(rig, "asking"))
    codes = [one.wait(_SOON_SECONDS) for one in (*downs, asking)]
    print(asking.text, *(down.text for down in downs), sep="\n---\n")
    assert codes == [0, 0, 143]
    (ended,) = _ends(rig, machine)
    assert ended["time"] - copying_at > _ORDERLY_SECONDS
    assert all("asking is down: verified" in down.text for down in downs)
    assert f"is ending it: {_COPYING}" in downs[0].text

    assert len(made) > 4
    assert _sha256(results / "durable" / "step-000001") == made
    adapter = {name.removeprefix("adapter/"): digest for name, digest in made.items() if _is_adapter(name)}
    assert _sha256(results / "adapter") == adapter
    assert (results / "metrics.jsonl").read_bytes() == metrics
    # They may have grown since.
    short = [
        name for name, text in logs.items() if not (results / "logs" / name).read_bytes().startswith(text)
    ]
    assert logs and not short
    assert asking.record["ended_by"] == "launch" and asking.record["unpulled"] is None
    _nothing_is_left(rig, asking)


def test_g34_p01_a_live_rented_run_is_left_alone_from_another_container(
    shared_rig: Rig, stuck: Launched
) -> None:
    rig = shared_rig
    stuck.wait_for("ready: http", UP_SECONDS)
    machine = _machine(rig, stuck)
    container = ("unshare", "--pid", "--fork", "--mount-proc", *_HASTY)
    collected = collect(rig, "--yes", launch=container, PYTHONPATH=str(REPOSITORY))
    status, resumed, down = (
        _typed(rig, container, *words)
        for words in (("status", "stuck"), ("--resume", "stuck", "-y", "--", "true"), ("down", "stuck"))
    )
    for code, said in zip((0, 0, 2, 2), (collected, status, resumed, down), strict=True):
        print(said.output)
        assert said.code == code, said.output
        assert "another container of this computer" in said.output and "heard of" in said.output
    assert machine in rig.alive() and not _ends(rig, machine)
    assert stuck.process.poll() is None and stuck.record["proof"] is None


def test_g29_what_cannot_come_home_keeps_its_machine_from_launch_down_and_gc_until_it_is_given_up(
    shared_rig: Rig, stuck: Launched
) -> None:
    rig = shared_rig
    stuck.wait_for("ready: http", UP_SECONDS)
    results, machine = stuck.run / "results", _machine(rig, stuck)
    _by_ssh(rig, "stuck", "sudo ln -sf /bin/false /usr/bin/rsync")
    (results / "train").touch()
    stuck.wait_for("trained 1: published", _SOON_SECONDS)
    (results / "end").touch()
    stuck.wait_for("the machine is kept for 10m at most", _SOON_SECONDS)
    assert "$27.52/h" in stuck.text.rpartition("the machine is kept")[2]

    refused = _verb(rig, "down", "stuck")
    print(refused.output)
    assert refused.code == 8
    assert f"Error: {_KEPT}" in refused.output
    assert "keeps trying while lease, deadline and budget allow" in refused.output
    assert stuck.process.poll() is None

    _leave_alone(rig, stuck)
    collected = collect(rig, "--yes", launch=_HASTY, PYTHONPATH=str(REPOSITORY))
    print(collected.output)
    assert collected.code == 8
    assert f"NOT removed: {_KEPT}" in collected.output
    assert "its machine keeps running at $27.52/h" in collected.output
    assert machine in rig.alive() and not _ends(rig, machine)
    assert stuck.record["state"] not in ("verified", "unverified")

    given_up = _verb(rig, "down", "stuck", "--give-up-results")
    print(given_up.output)
    assert "stuck is down: verified" in given_up.ok()
    assert "its newest results are lost with it: the user gave them up" in given_up.output
    assert len(_ends(rig, machine)) == 1 and machine not in rig.alive()
    record = stuck.record
    assert record["state"] == "verified" and record["ended_by"] == "down" and record["unpulled"]
    assert not (results / "durable").exists()
    _nothing_is_left(rig, stuck)


# ------------------------------------------------------------------ launch and its verbs


def _launch(rig: Rig, name: str, *words: str) -> Launched:
    code = os.pathsep.join([small_code(rig), str(REPOSITORY)])
    return Launched(rig, [*RENTED, "--name", name, *words], launch=_HASTY, name=name, PYTHONPATH=code)


def _down(rig: Rig, name: str) -> Launched:
    """`launch down`, on its way."""
    return Launched(rig, ["down", name], launch=_HASTY, PYTHONPATH=str(REPOSITORY))


def _verb(rig: Rig, *words: str) -> Finished:
    return _typed(rig, _HASTY, *words)


def _typed(rig: Rig, launch: Sequence[str], *words: str) -> Finished:
    return rig.run([*launch, *words], environ=rig.environ(NO_COLOR="1", PYTHONPATH=str(REPOSITORY)))


def _leave_alone(rig: Rig, launched: Launched) -> None:
    """Whoever looks after it is killed, the guardian first."""
    guardians = running(rig, "launcher.teardown.guardian")
    (guardian,) = [pid for pid, line in guardians.items() if launched.run.name in line]
    os.kill(guardian, signal.SIGKILL)
    launched.send(signal.SIGKILL)
    assert launched.wait(_SOON_SECONDS) == -9


def _doing(launched: Launched) -> str:
    """What whoever ends the run says that it is at."""
    said = (launched.run / ".teardown").read_text().strip()
    return json.loads(said)["doing"] if said else ""


def _answered(launched: Launched) -> tuple[int, float, float] | None:
    """What the program says of its question: code, seconds, the patience it was told."""
    words = next((line.split() for line in launched.text.splitlines() if line.startswith("answered ")), [])
    return (int(words[1]), float(words[3]), float(words[6])) if len(words) == 8 else None


def _nothing_is_left(rig: Rig, launched: Launched) -> None:
    name = launched.run.name
    wait_until(lambda: not running(rig, name), what=lambda: f"the end of {running(rig, name)}")


# ------------------------------------------------------------------ the machine


def _machine(rig: Rig, launched: Launched) -> str:
    """The instance that a run is on."""
    address = launched.record["machine"]["standing"]["address"]
    (made,) = [one for one in rig.witness("run") if one["address"] == address]
    return made["id"]


def _ends(rig: Rig, machine: str) -> list[dict[str, Any]]:
    """How often the provider was told to end it."""
    return [one for one in rig.witness("terminate", "stop") if one["id"] == machine]


def _on_its_machine(rig: Rig, launched: Launched) -> Path:
    """The run's folder there, seen through its machine's first process."""
    first = [pid for pid, line in running(rig, "inside/reaper.py").items() if "python" in line]
    places = [Path("/proc", str(pid), "root/home/ubuntu/slipway", launched.run.name) for pid in first]
    (there,) = [place for place in places if place.is_dir()]
    return there


def _by_ssh(rig: Rig, name: str, command: str) -> None:
    config = rig.home / ".ssh" / "config"
    rig.run(["ssh", "-F", str(config), name, command], cwd=REPOSITORY).ok()


def _asked(there: Path) -> list[str]:
    """The ids of the questions that the runtime held back, one for each time that it was asked."""
    path = there / "held.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["request"] for line in lines]


def _sha256(folder: Path) -> dict[str, str]:
    """Of each file below it, by its path."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _is_adapter(name: str) -> bool:
    """Of a checkpoint's files, those of `results/adapter`."""
    return name.startswith("adapter/") or name == "state.json"
