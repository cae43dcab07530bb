"""The gateway, killed at named instants of a step: one sample per request, one step per key, one version.

The gateway and the trainer are the real ones (the trainer on a model of two layers); the engine's answers are
made up (pretend_engine.py). What kills a real engine is in test_crash_engine.py.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.gateway.steps.step_registry import MAX_QUEUED
from runtime.shared import failpoints
from tests.runtime.failpoints import arm, instants
from tests.runtime.gateway_process import Gateway
from tests.runtime.pretend_engine import PretendEngine
from tests.runtime.trainers import Run, Trainers
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


class Served:
    """A run with its gateway and trainer; a gateway that died is started again, as the supervisor would."""

    def __init__(self, folder: Path, trainers: Trainers, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = Run(folder, trainers)
        self.armed = folder / "armed"
        monkeypatch.setenv(failpoints.VARIABLE, f"file:{self.armed}")
        self._sockets = Path(tempfile.mkdtemp(prefix="slip-"))
        self.engine = PretendEngine(self._sockets / "e.sock")
        self.gateway = Gateway(folder, self.engine.socket, folder, max_staleness=MAX_QUEUED)
        self.gateway.until_ready()
        self.trainer: int | None = None
        self.restarts = 0

    def start_trainer(self, failpoint: str = "") -> None:
        self.trainer = self.run.start(follow=True, failpoint=failpoint)

    def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        """One request, sent again until it is answered: what the relay does, with the same id."""
        end = time.monotonic() + 60
        while True:
            try:
                return self.gateway.http.request(method, path, **request)
            except httpx.TransportError:
                assert time.monotonic() < end
                self.gateway.process.wait(60)
                self.gateway.http.close()
                self.gateway.start()
                self.gateway.until_ready()
                self.restarts += 1

    def sample(self, rollout: str) -> dict[str, Any]:
        body = {"model": "policy", "messages": [{"role": "user", "content": rollout}]}
        headers = {"x-slipway-request": f"request-{rollout}"}
        answer = self.ask("POST", f"/rollouts/{rollout}/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def request(self, key: str) -> dict[str, Any]:
        """A step's body over four rollouts sampled now."""
        rollouts = [f"{key}-{number}" for number in range(4)]
        for rollout in rollouts:
            self.sample(rollout)
        members = [{"rollout": name, "reward": float(index)} for index, name in enumerate(rollouts)]
        return {"key": key, "groups": [{"id": "g", "members": members}], "client_state": {"key": key}}

    def finished(self, step: int) -> dict[str, Any]:
        def ended() -> dict[str, Any] | None:
            said = self.ask("GET", f"/slipway/steps/{step}", params={"wait": 5}).json()
            return said if said["state"] in ("published", "failed") else None

        return wait_until(ended, 240)

    def step(self, key: str) -> dict[str, Any]:
        posted = self.ask("POST", "/slipway/steps", json=self.request(key))
        assert posted.status_code == 202, posted.text
        return self.finished(posted.json()["id"])

    def close(self) -> None:
        self.gateway.stop()
        if self.trainer is not None:
            os.kill(self.trainer, signal.SIGTERM)
            assert self.run.trainers.wait(self.trainer) == 0, self.run.log
        self.engine.close()


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    server = Trainers()
    yield server
    server.close()


@pytest.fixture
def served(
    trainers: Trainers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Served]]:
    started: list[Served] = []

    def start() -> Served:
        started.append(Served(tmp_path, trainers, monkeypatch))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_c40_g18_killed_at_every_named_instant_a_gateway_ends_with_one_step_and_one_version(served) -> None:
    it: Served = served()
    it.start_trainer()
    names = sorted(instants("gateway") - {"gateway.empty"})  # the next test's
    assert len(names) >= 8
    for number, name in enumerate(names, start=1):
        arm(it.armed, f"{name}:kill9")
        done = it.step(f"key-{number}")
        assert not it.armed.exists() and it.restarts == number, f"{name} was not passed"
        assert (done["id"], done["state"], done["version"]) == (number, "published", number), (name, done)
        assert done["counts"]["trained"] == done["counts"]["samples"] == 4, (name, done)
        serving = json.loads((it.run.folder / "serving.json").read_text())
        status = it.gateway.status()
        assert serving["version"] == status["version"] == it.run.step == number, name
        assert it.sample(f"after-{number}")["model"] == f"policy@v{number}", name
        assert status["client_state"] == {"key": f"key-{number}"} and status["steps_queued"] == 0
    # What was recorded is never asked for again; what the gateway died with in its hands has to be.
    twice = [rollout for rollout, count in it.engine.asked.items() if count > 1]
    assert twice == [f"key-{names.index('gateway.recording') + 1}-0"]
    assert len(it.gateway.recorded()) == len(it.engine.asked)
    wait_until(lambda: it.run.logged == list(range(1, len(names) + 1)))  # after it was published
    rows = it.ask("GET", "/slipway/metrics").json()
    assert [row["step"] for row in rows] == it.run.logged


def test_c69_killed_when_an_empty_step_is_recorded_a_gateway_gives_the_same_answer_again(served) -> None:
    it: Served = served()
    it.start_trainer()
    request = it.request("flat")
    for member in request["groups"][0]["members"]:
        member["reward"] = 0.5
    arm(it.armed, "gateway.empty:kill9")
    answer = it.ask("POST", "/slipway/steps", json=request)  # its first answer is lost
    assert not it.armed.exists() and it.restarts == 1
    again = it.ask("POST", "/slipway/steps", json=request)
    assert answer.json() == again.json() and answer.json()["state"] == "empty"
    assert len((it.run.folder / "empty_steps.jsonl").read_text().splitlines()) == 1
    done = it.step("key-1")
    assert (done["id"], done["version"], done["metrics"]["empty_steps"]) == (1, 1, 1)


def test_g18_a_step_whose_answer_was_lost_is_sent_again_by_many_at_once_and_trained_once(served) -> None:
    it: Served = served()
    request = it.request("key")
    arm(it.armed, "gateway.queued:kill9")
    first = it.ask("POST", "/slipway/steps", json=request)  # its answer is lost; this is that of the second
    assert it.restarts == 1 and first.json()["id"] == 1
    with ThreadPoolExecutor(4) as pool:
        again = [pool.submit(it.gateway.http.post, "/slipway/steps", json=request) for _ in range(4)]
    it.start_trainer()
    assert {answer.result().json()["id"] for answer in again} == {1}
    assert it.finished(1)["version"] == 1
    other = it.ask("POST", "/slipway/steps", json=request | {"client_state": {"key": "other"}})
    assert other.status_code == 409 and other.json()["error"]["code"] == "key_reused"
    assert len(it.ask("GET", "/slipway/steps").json()) == 1
    wait_until(lambda: it.run.logged == [1])


def test_c45_a_full_queue_answers_429_and_every_step_it_took_is_trained(served) -> None:
    it: Served = served()
    requests = [it.request(f"key-{number}") for number in range(MAX_QUEUED + 1)]
    answers = [it.ask("POST", "/slipway/steps", json=request) for request in requests]
    assert [answer.status_code for answer in answers] == [202] * MAX_QUEUED + [429]
    assert answers[-1].json()["error"]["code"] == "queue_full" and int(answers[-1].headers["retry-after"]) > 0
    assert it.ask("POST", "/slipway/steps", json=requests[0]).json()["id"] == 1, "known: it is not one more"
    it.start_trainer()
    last = it.finished(MAX_QUEUED)
    assert last["version"] == MAX_QUEUED
    wait_until(lambda: it.run.logged == list(range(1, MAX_QUEUED + 1)))
    assert it.ask("POST", "/slipway/steps", json=requests[-1]).status_code == 202
    assert it.finished(MAX_QUEUED + 1)["counts"]["trained"] == 4


def test_a_published_steps_metrics_are_answered_even_before_the_trainer_has_logged_them(served) -> None:
    it: Served = served()
    it.start_trainer("trainer.committed:hang")
    assert it.step("key")["state"] == "published" and it.run.logged == []
    (row,) = it.ask("GET", "/slipway/metrics").json()
    assert row["step"] == 1 and row["counts"]["trained"] == 4 and row["metrics"]["updated"] == 1
    assert it.ask("GET", "/slipway/metrics", params={"after": 1}).json() == []
    assert it.trainer is not None
    os.kill(it.trainer, signal.SIGKILL)
    it.run.trainers.wait(it.trainer)
    it.start_trainer()
    wait_until(lambda: it.run.logged == [1])
    assert it.ask("GET", "/slipway/metrics").json() == [row]


def test_a_full_disk_is_503_and_what_is_asked_again_once_there_is_room_is_done_once(served) -> None:
    it: Served = served()
    it.start_trainer()
    body = {"model": "policy", "messages": [{"role": "user", "content": "full"}]}
    arm(it.armed, "gateway.recording:full")
    refused = it.gateway.chat("full", {"x-slipway-request": "request-full"}, **body)
    assert refused.status_code == 503 and "No space left" in refused.json()["error"]["message"]
    request = it.request("key")
    arm(it.armed, "gateway.queued:full")
    refused = it.ask("POST", "/slipway/steps", json=request)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    assert "disk" in refused.json()["error"]["message"]
    arm(it.armed, "gateway.giving:full")
    assert it.ask("POST", "/slipway/steps", json=request).json()["id"] == 1
    wait_until(lambda: not it.armed.exists(), what="the step is given, and the disk is full")
    assert "No space left" in wait_until(lambda: _said_of_a_full_disk(it))
    it.armed.unlink(missing_ok=True)
    assert it.finished(1)["version"] == 1 and it.gateway.status()["detail"] is None
    assert it.restarts == 0
    assert [line for line in it.gateway.recorded() if line["tags"]["rollout"] == "full"] == []


def _said_of_a_full_disk(it: Served) -> str | None:
    """It is full for as long as nothing is said of it."""
    if not it.armed.exists():
        arm(it.armed, "gateway.giving:full")
    return it.gateway.status()["detail"]


def test_a_program_that_went_back_with_its_run_is_told_so_on_the_wire(served, tmp_path: Path) -> None:
    rewound = {"to_step": 3, "time": time.time(), "client_state": {"at": 3}}
    (tmp_path / "rewound.json").write_text(json.dumps(rewound))
    it: Served = served()
    member = {"rollout": f"lost-{uuid.uuid4()}", "reward": 1.0}
    body = {"key": "late", "groups": [{"id": "g", "members": [member]}]}
    for answer in (it.ask("POST", "/slipway/steps", json=body), it.ask("GET", "/slipway/steps/4")):
        assert answer.status_code == 409
        error = answer.json()["error"]
        assert (error["code"], error["step"], error["client_state"]) == ("rewound", 3, {"at": 3})
        assert error["lost_at"] == rewound["time"]
    assert it.ask("GET", "/slipway/steps/2").status_code == 404
