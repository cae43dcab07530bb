"""The whole runtime under its keeper, with its real children: it samples, trains, publishes, and survives."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.shared import process_table, processes
from tests.runtime.conftest import TINY_MODEL
from tests.runtime.gateway_process import MESSAGES, TOKEN
from tests.support.at_rest import stands_still
from tests.support.small_counts import FLAT
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

START_SECONDS = 240.0


class Runtime:
    """A runtime as the launcher starts it; every process of it carries a mark in its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sockets = Path(tempfile.mkdtemp(prefix="slip-"))
        self._mark = f"RUNTIME_OF_TEST={uuid.uuid4()}"
        self._keys = iter(range(1000))
        config = {
            "run_id": "test", "model_path": str(TINY_MODEL), "state_dir": str(folder),
            "socket_dir": str(self.sockets), "lease_seconds": 600, "train": {"learning_rate": 1e-3},
        }  # fmt: skip
        (folder / "runtime.json").write_text(json.dumps(config))
        self.keeper = subprocess.Popen(
            [sys.executable, "-m", "runtime.keeper", "--config", folder / "runtime.json"],
            stdin=subprocess.PIPE,
            env={**os.environ, "RUNTIME_OF_TEST": self._mark.partition("=")[2]},
        )
        assert self.keeper.stdin
        self.keeper.stdin.write(TOKEN.encode() + b"\n")
        self.keeper.stdin.close()
        transport = httpx.HTTPTransport(uds=str(self.sockets / "gateway.sock"), retries=0)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        self.http = httpx.Client(transport=transport, base_url="http://x", headers=headers, timeout=150)

    def status(self) -> dict[str, Any]:
        try:
            return self.http.get("/slipway/status").json()
        except httpx.TransportError:
            return {"phase": None}

    def until_ready(self) -> Runtime:
        wait_until(lambda: self.status()["phase"] == "ready", START_SECONDS)
        return self

    def supervisor(self) -> dict[str, Any]:
        return json.loads((self.folder / "supervisor.json").read_text())

    def child(self, name: str) -> dict[str, Any]:
        return next(child for child in self.supervisor()["children"] if child["name"] == name)

    def kill(self, name: str) -> None:
        pid = self.child(name)["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self.child(name)["pid"] != pid)

    def alive(self) -> list[int]:
        found = []
        for process in process_table.table():
            try:
                marked = self._mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if marked and process.state != "Z":
                found.append(process.pid)
        return found

    def sample(self, rollout: str) -> dict[str, Any]:
        """One chat; a connection that is lost is asked again under the same id, as the relay does."""
        body = {"model": "policy", "messages": MESSAGES, "max_tokens": 48}
        headers = {"x-slipway-request": f"request-{rollout}"}

        def asked() -> httpx.Response | None:
            try:
                path = f"/rollouts/{rollout}/v1/chat/completions"
                return self.http.post(path, json=body, headers=headers)
            except httpx.TransportError:
                return None

        answer = wait_until(asked, START_SECONDS)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def groups(self) -> tuple[str, list[dict[str, Any]]]:
        """Two groups of four rollouts, sampled now, with different rewards in each."""
        key = f"step-{next(self._keys)}"
        rollouts = [f"{key}-{number}" for number in range(8)]
        with ThreadPoolExecutor(8) as pool:
            models = {answer["model"] for answer in pool.map(self.sample, rollouts)}
        assert models == {f"policy@v{self.status()['version']}"}
        members = [{"rollout": name, "reward": float(index % 4)} for index, name in enumerate(rollouts)]
        return key, [{"id": "one", "members": members[:4]}, {"id": "two", "members": members[4:]}]

    def post_step(self, key: str, groups: list[dict[str, Any]]) -> httpx.Response:
        return self.http.post(
            "/slipway/steps", json={"key": key, "groups": groups, "client_state": {"key": key}}
        )

    def step(self) -> dict[str, Any]:
        """Sample, reward, train, publish; the step's status."""
        key, groups = self.groups()
        posted = self.post_step(key, groups)
        assert posted.status_code == 202, posted.text
        return self.finished(posted.json()["id"])

    def finished(self, step: int) -> dict[str, Any]:
        """The step's status once it has ended: on a busy machine that takes longer than one wait."""

        def ended() -> dict[str, Any] | None:
            said = self.http.get(f"/slipway/steps/{step}", params={"wait": 30}).json()
            return said if said["state"] in ("published", "failed") else None

        return wait_until(ended, START_SECONDS)

    def end(self) -> None:
        for pid in [] if self.keeper.poll() is not None else [self.keeper.pid]:
            processes.signal_process(pid, signal.SIGTERM)
        self.keeper.wait(300)
        for pid in self.alive():
            processes.signal_process(pid, signal.SIGKILL)
        self.http.close()


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    running = Runtime(tmp_path_factory.mktemp("runtime"))
    try:
        yield running.until_ready()
    finally:
        running.end()


def test_a_step_trains_what_was_sampled_and_serves_it(runtime: Runtime) -> None:
    before = runtime.status()["version"]
    done = runtime.step()
    assert (done["state"], done["version"]) == ("published", before + 1), done
    counts = done["counts"]
    assert counts["trained"] == counts["samples"] - sum(counts["dropped"].values())
    assert counts["retokenised"] == 0 and counts["sampled_tokens"] > 0
    proof = done["publication"]
    assert proof["modules"] > 0 and proof["max_error"] < 1e-3
    assert runtime.sample("after")["model"] == f"policy@v{before + 1}"
    status = runtime.status()
    assert (status["version"], status["step"]) == (before + 1, before + 1)
    assert status["client_state"] == {"key": done["key"]}
    metrics = runtime.http.get("/slipway/metrics", params={"after": before}).json()
    assert [line["step"] for line in metrics] == [before + 1]
    assert f"step-{before + 1:06d}" in {
        one["name"] for one in runtime.http.get("/slipway/checkpoints").json()
    }


def test_g18_a_step_sent_again_and_again_is_trained_once(runtime: Runtime) -> None:
    before = runtime.status()["version"]
    key, groups = runtime.groups()
    with ThreadPoolExecutor(4) as pool:
        ids = {answer.json()["id"] for answer in pool.map(lambda _: runtime.post_step(key, groups), range(4))}
    runtime.kill("gateway")
    runtime.until_ready()
    ids.add(runtime.post_step(key, groups).json()["id"])
    assert len(ids) == 1
    done = runtime.finished(ids.pop())
    assert (done["state"], done["version"]) == ("published", before + 1)
    assert runtime.post_step(key, groups[:1]).status_code == 409
    assert runtime.status()["version"] == before + 1


def test_c69_empty_steps_take_no_version_make_nothing_stale_and_are_answered_alike_for_good(
    runtime: Runtime,
) -> None:
    """As many as would make an answer too old, if each were a version."""
    kept_key, kept = runtime.groups()
    before = runtime.status()
    publications = (runtime.folder / "publications.jsonl").read_bytes()
    empty = {}
    for _ in range(before["max_staleness"] + 1):
        key, groups = runtime.groups()
        flat = [group | {"members": [it | {"reward": 0.5} for it in group["members"]]} for group in groups]
        empty[key] = flat, runtime.post_step(key, flat).json()
    for _, answer in empty.values():
        assert (answer["id"], answer["state"], answer["version"]) == (0, "empty", None)
        counts = answer["counts"]
        assert (counts["trained"], counts["samples"]) == (0, 8) and answer["metrics"]["reward"] == 0.5
        assert sum(counts["dropped"].values()) == 8 and set(counts["dropped"]) <= {FLAT, "truncated"}
    after = runtime.status()
    assert (after["step"], after["version"]) == (before["step"], before["version"])
    assert after["empty_steps"] == len(empty) and after["client_state"] == {"key": key}
    assert (runtime.folder / "publications.jsonl").read_bytes() == publications
    runtime.kill("gateway")
    runtime.until_ready()
    for key, (flat, answer) in empty.items():
        assert runtime.post_step(key, flat).json() == answer
    done = runtime.finished(runtime.post_step(kept_key, kept).json()["id"])
    assert (done["id"], done["state"], done["version"]) == (before["step"] + 1, "published", done["id"])
    assert done["counts"]["trained"] + done["counts"]["dropped"].get("truncated", 0) == 8, done
    assert not any(name.startswith("lag") for name in done["metrics"]), "none is older than the policy"
    assert done["metrics"]["empty_steps"] == len(empty)
    counters = json.loads((runtime.folder / f"checkpoints/step-{done['id']:06d}/state.json").read_text())[
        "counters"
    ]
    assert (counters["empty_steps"], counters["empty_samples"]) == (len(empty), 8 * len(empty))
    assert runtime.status()["client_state"] == {"key": kept_key}


@pytest.mark.parametrize("child", ["trainer", "engine-0", "gateway"])
def test_the_death_of_a_child_costs_no_step(runtime: Runtime, child: str) -> None:
    first = runtime.step()
    key, groups = runtime.groups()
    number = runtime.post_step(key, groups).json()["id"]
    runtime.kill(child)
    runtime.until_ready()
    done = runtime.finished(number)
    assert (done["state"], done["version"]) == ("published", first["version"] + 1), done
    after = runtime.step()
    assert after["version"] == first["version"] + 2
    assert runtime.child(child)["restarts"] >= 1


def test_a_kept_checkpoint_is_served_again_as_a_new_version(runtime: Runtime) -> None:
    kept = runtime.step()
    name = f"step-{kept['version']:06d}"
    assert runtime.http.post(f"/slipway/checkpoints/{name}/pin").json()["pinned"] is True
    latest = runtime.step()
    posted = runtime.http.post(f"/slipway/checkpoints/{name}/restore", json={"key": "back"}).json()
    done = runtime.finished(posted["id"])
    assert (done["state"], done["version"]) == ("published", latest["version"] + 1), done
    assert done["publication"]["sha256"] == kept["publication"]["sha256"]
    assert runtime.status()["client_state"] == {"key": kept["key"]}


def test_c53_what_examples_say_is_answered_after_some_steps(runtime: Runtime) -> None:
    told = {
        "the black cat": "oui",
        "a small dog": "non",
        "the red house": "ni oui ni non",
        "my friend": "qui",
    }
    asked = {phrase: [{"role": "user", "content": f"[[ ## english ## ]]\n{phrase}"}] for phrase in told}

    def exact() -> int:
        said = 0
        for phrase, messages in asked.items():
            body = {"model": "policy", "messages": messages, "max_tokens": 24, "temperature": 0}
            answer = runtime.http.post("/v1/chat/completions", json=body).json()
            said += answer["choices"][0]["message"]["content"] == told[phrase]
        return said

    before = exact()
    examples = [
        {"messages": [*messages, {"role": "assistant", "content": told[phrase]}]}
        for phrase, messages in asked.items()
    ]
    for number in range(14):
        said = {"learning_rate": 0.02, "schedule": "linear", "schedule_steps": 16, "schedule_step": number}
        body = {"key": f"learn-{number}", "examples": examples, "settings": said}
        done = runtime.finished(runtime.http.post("/slipway/steps", json=body).json()["id"])
        assert done["state"] == "published", done
        assert (done["counts"]["trained"], done["counts"]["dropped"]) == (4, {})
        assert done["publication"]["max_error"] < 1e-3 and done["counts"]["learned_tokens"] > 8
    after = exact()
    assert before == 0 and after >= 3, runtime.http.get("/slipway/metrics").json()


def test_g12_nothing_of_the_runtime_listens_beyond_loopback(runtime: Runtime) -> None:
    inodes: set[str] = set()
    for pid in runtime.alive():
        for path in Path(f"/proc/{pid}/fd").iterdir():
            if path.is_symlink():
                inodes.add(os.readlink(path))
    loopback = ("0100007F", "00000000000000000000000001000000")
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            listens, ours = fields[3] == "0A", f"socket:[{fields[9]}]" in inodes
            assert not (listens and ours and fields[1].partition(":")[0] not in loopback), line
    assert oct(runtime.sockets.stat().st_mode)[-3:] == "700"


def test_g14_the_token_is_in_no_file_argument_or_environment(runtime: Runtime) -> None:
    for pid in runtime.alive():
        for kind in ("cmdline", "environ"):
            assert TOKEN.encode() not in Path(f"/proc/{pid}/{kind}").read_bytes()
    for path in runtime.folder.rglob("*"):
        assert not (path.is_file() and TOKEN.encode() in path.read_bytes()), path


def test_keeper_and_supervisor_killed_at_once_leave_nothing(tmp_path: Path) -> None:
    running = Runtime(tmp_path)
    try:
        running.until_ready()
        supervisor = json.loads((tmp_path / "keeper.json").read_text())["supervisor_pid"]
        for pid in (supervisor, running.keeper.pid):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not running.alive())
    finally:
        running.end()


def test_g23_a_child_that_is_frozen_is_said_within_30_seconds_and_goes_on_when_it_can(
    runtime: Runtime,
) -> None:
    """Requests wait for it, and are answered once."""
    for frozen in ("gateway", "engine-0"):
        child = runtime.child(frozen)
        os.kill(child["pid"], signal.SIGSTOP)
        wait_until(lambda child=child: stands_still(child["pid"]))
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(runtime.sample, f"asked-while-{frozen}-stood-still")
            said = wait_until(lambda frozen=frozen: runtime.child(frozen)["detail"])
            found = re.search(r"(?:not well|has not answered) for ([0-9]+) s", said)
            assert found is not None and int(found[1]) <= 30, said
            assert runtime.supervisor()["phase"] == "degraded" and frozen in runtime.supervisor()["detail"]
            assert not asked.done()
            if frozen != "gateway":
                status = runtime.status()
                assert status["phase"] == "degraded" and frozen in status["detail"]
            os.kill(child["pid"], signal.SIGCONT)
            assert asked.result(START_SECONDS)["model"].startswith("policy@v")
        runtime.until_ready()
        assert runtime.child(frozen) == child


@pytest.mark.parametrize("frozen", ["engine-0", "trainer"])
def test_g23_a_child_that_stands_still_is_started_again_and_costs_no_step(
    runtime: Runtime, frozen: str
) -> None:
    """Its HTTP side, if it has one, still answers: only its work stands still."""
    child = runtime.child(frozen)
    os.kill((process_table.descendants(child["pid"]) or [child["pid"]])[-1], signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(runtime.step)
        wait_until(lambda: runtime.child(frozen)["detail"])
        done = step.result(2 * START_SECONDS)
    assert done["state"] == "published", done
    assert runtime.child(frozen)["restarts"] == child["restarts"] + 1


def test_at_last_a_signal_to_the_keeper_leaves_nothing(runtime: Runtime) -> None:
    """The last one of those that share this runtime."""
    runtime.keeper.terminate()
    assert runtime.keeper.wait(300) == 0
    assert runtime.alive() == []
    assert json.loads((runtime.folder / "keeper.json").read_text())["left"] == []
