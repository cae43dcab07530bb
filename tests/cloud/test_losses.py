"""A rented run that loses its link again and again, and then its machine. The runtime is the real one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.cloud.launched import RENTED, Launched, left, running, verb
from tests.cloud.rig import REPOSITORY, Rig
from tests.support.environment import PROGRAMS
from tests.support.waiting import wait_until

# In every run: `test_link.py` and `test_ends.py` cut a rented run's link; 200 rollouts over a link that is
# lost again and again are in `tests/unit/test_relay.py`, a machine taken back in `test_ending_results.py`.
pytestmark = [pytest.mark.slow, pytest.mark.long]

_ROLLOUTS = 200
_KILL_EVERY_SECONDS = 3.0
# Silence is noticed after 5 s, ssh gives up after 10, SkyPilot's import and its question take the rest: a
# minute in all on a quiet computer.
_NOTICED_SECONDS = 600


class _Killer:
    """Kills the link's ssh every few seconds, from entering to leaving."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.kills = 0

    def __enter__(self) -> _Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_KILL_EVERY_SECONDS):
            for pid in running(self._rig, "ssh -N -n -T"):
                os.kill(pid, signal.SIGKILL)
                self.kills += 1


def test_g17_ssh_killed_every_three_seconds_costs_no_rollout_and_a_machine_taken_back_is_noticed(
    runtime_rig: Rig,
) -> None:
    rig = runtime_rig
    program = [str(PROGRAMS / "cloud" / "many_rollouts.py"), str(_ROLLOUTS)]
    # A model of the user's own, which the machine has from this computer alone.
    model = rig.folder / "my model"
    shutil.copytree(REPOSITORY / "runtime" / "tiny" / "model", model)
    words = [*RENTED, "--name", "lossy", "--max", "1h", "--model", str(model)]
    launched = Launched(rig, [*words, "--", "python", *program])
    launched.wait_for("ready: http", 900)
    with _Killer(rig) as killer:
        launched.wait_for("trained 1: published", 900)
    assert f"answers={_ROLLOUTS} distinct={_ROLLOUTS}" in launched.text, launched.text
    assert "Traceback" not in launched.text
    assert killer.kills >= 4
    assert "model.safetensors" in verb(rig, "ssh", "lossy", "--", "ls slipway-models/my-model")
    sampled = _sampled(rig)
    assert sorted(sampled) == sorted(f"r{number}" for number in range(_ROLLOUTS))
    _the_machine_is_taken_back(rig, launched)
    print(launched.text, f"kills={killer.kills}")


def _sampled(rig: Rig) -> list[str]:
    """The rollout of each completion in the gateway's own journal, twice where it was sampled twice."""
    lines = verb(rig, "exec", "lossy", "--", "sh", "-c", "cat ~/slipway/*/samples/*.jsonl").splitlines()
    exchanges = [json.loads(line) for line in lines if line.startswith("{")]
    return [one["tags"]["rollout"] for one in exchanges for _ in one.get("samples", ())]


def _the_machine_is_taken_back(rig: Rig, launched: Launched) -> None:
    """It is noticed and said; what was durable is at home; nothing is left."""
    (run,) = rig.witness("run")
    durable = Path(launched.run) / "results" / "durable" / "step-000001"
    wait_until(durable.is_dir, 120, what=lambda: f"its step to be at home\n{launched.text}")
    taken_at = time.monotonic()
    rig.faults("preempt", run["id"])
    assert launched.wait(_NOTICED_SECONDS) == 6, launched.text
    print(f"over {time.monotonic() - taken_at:.0f} s after the machine was taken back")
    assert "Error: the machine is gone" in launched.text, launched.text
    assert launched.record["state"] == "verified"
    state = json.loads((launched.run / "results" / "adapter" / "state.json").read_text())
    assert (state["step"], state["client_state"]) == (1, {"place": 7})
    assert (Path(launched.run) / "results" / "logs" / "gateway.log").exists()
    assert not rig.alive()
    wait_until(lambda: not left(rig), what=lambda: f"{left(rig)} to be gone")
