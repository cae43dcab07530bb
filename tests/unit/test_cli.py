"""What the verbs print and answer: exit codes, the keys of `--json`. What is refused: test_refusals_*.py."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.backends.local_machine import LocalMachine
from launcher.base.credentials import SECRETS
from launcher.base.home import Home
from launcher.records.endpoint import save_token
from launcher.records.records import RecordStore
from tests.support.typed import Typed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """`launch("status", "--json")` in a home and a folder of its own."""
    return Typed(tmp_path / "project", tmp_path / "home")


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(Home.find({"LAUNCH_HOME": str(tmp_path / "home")}))


def fails(done: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    """It failed with this code, and stderr is three lines: what, why, a hint; no traceback."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    what, why, hint = done.stderr.splitlines()
    assert what.startswith("Error: ")
    assert why.startswith("  ")
    assert hint.startswith("Hint: ")
    for part in parts:
        assert part in done.stderr


def test_an_error_as_json_is_one_object(launch: Launch) -> None:
    done = launch("--json", "--", "no-such-program")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert found["schema"] == 1
    assert set(found) == {"schema", "event", "error", "log"}
    assert set(found["error"]) == {"type", "message", "why", "hint", "exit_code"}


def test_a_traceback_is_shown_only_with_debug(launch: Launch) -> None:
    assert "Traceback" not in launch("--", "no-such-program").stderr
    assert "Traceback" in launch("--debug", "--", "no-such-program").stderr


def test_colour_comes_when_forced_and_goes_when_refused(launch: Launch) -> None:
    assert "\x1b[" not in launch("statsu").stderr
    assert "\x1b[31m" in launch("statsu", FORCE_COLOR="1").stderr
    assert "\x1b[" not in launch("statsu", FORCE_COLOR="1", NO_COLOR="1").stderr


def test_status_lists_nothing_politely_and_as_json(launch: Launch) -> None:
    done = launch("status")
    assert done.returncode == 0
    assert "no runs yet" in done.stdout
    assert json.loads(launch("status", "--json").stdout) == {"schema": 1, "runs": []}


RUN_KEYS = {
    "committed_step", "durable_step", "durable_bound_steps",
    "id", "name", "state", "live", "attended", "elsewhere", "created", "ended", "ended_by", "reason", "why",
    "exit_code", "command", "base_url", "folder", "down", "price_per_hour", "cost", "lives", "unpulled",
    "troubles", "model", "steps", "reward", "seconds", "outcome",
}  # fmt: skip


def test_status_shows_a_recorded_run(launch: Launch, store: RecordStore) -> None:
    record = store.create(name="dev", command=("python", "x.py"))
    (described,) = json.loads(launch("status", "--json").stdout)["runs"]
    assert set(described) == RUN_KEYS
    one = json.loads(launch("--json", "status", "dev").stdout)
    assert set(one) == {"schema", "run", "runtime", "compiles"}
    assert one["run"]["id"] == record.id
    assert record.id in launch("status").stdout
    shown = dict(line.split(maxsplit=1) for line in launch("status", "dev").stdout.splitlines())
    assert shown["program"] == "python x.py" and shown["state"] == "created"
    assert shown["cost"] == "$0.00, nothing is rented"


_PROOF = {"verified": True, "detail": "nothing is left"}
# What the record says of an end, and what `launch status` shows of it.
_ENDS = {
    "good": ({"exit_code": 0}, "succeeded"),
    "bad": ({"exit_code": 3, "reason": "the program failed"}, "failed with code 3"),
    "refused": ({"reason": "owner/model is refused"}, "failed"),
    "ctrl-c": ({"reason": "interrupted by SIGINT"}, "stopped by Ctrl-C"),
    "late": ({"reason": "the budget of $40 is spent"}, "stopped: the budget of $40 is spent"),
    "downed": ({"ended_by": "down"}, "ended by launch down"),
    "left": ({"ended_by": "gc", "exit_code": 1}, "failed with code 1, ended by launch gc"),
    "away": ({"exit_code": 0, "unpulled": "the disk is full"}, "succeeded, newest results not copied"),
}


def test_n09_the_list_of_runs_shows_how_each_ended_its_steps_reward_and_fixed_duration(
    launch: Launch, store: RecordStore
) -> None:
    for name, (end, _) in _ENDS.items():
        run = store.create(name=name, command=("x",), details={"plan": {"model": "owner/model"}})
        ended = {"ended": run.created + 125, "ended_by": "launch", "proof": _PROOF, "state": "verified"}
        store.update(run.id, **(ended | end))
    results = store.folder(store.load("good").id) / "results"
    results.mkdir()
    lines = [{"step": 1, "metrics": {"reward": 0.25}}, {"step": 2, "metrics": {"updated": 0.0}}]
    (results / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{torn")
    unproven = {"verified": False, "detail": "the list is refused"}
    store.update(store.load("bad").id, state="unverified", proof=unproven)
    heading, *rows = launch("status").stdout.splitlines()
    assert heading.split() == ["NAME", "ID", "STATE", "DOWN", "MODEL", "STEPS", "REWARD", "DURATION", "COST"]
    shown = {cells[0]: cells[2:] for cells in (re.split(r" {2,}", row) for row in rows)}
    assert {name: cells[0] for name, cells in shown.items()} == {
        name: end for name, (_, end) in _ENDS.items()
    }
    assert shown["good"][1:] == ["verified", "owner/model", "2", "0.25", "2m 05s", "$0.00"]
    assert shown["bad"][1] == "NOT VERIFIED" and shown["bad"][5] == "2m 05s"
    store.update(store.load("bad").id, launch=None)
    assert "failed with code 3, left alone: launch down bad" in launch("status").stdout
    assert "failed with code 3, left alone: launch down bad" in launch("status", "bad").stdout
    described = {run["name"]: run for run in json.loads(launch("status", "--json").stdout)["runs"]}
    assert described["good"]["outcome"] == "succeeded" and described["good"]["seconds"] == 125
    assert (described["good"]["reward"], described["good"]["model"]) == (0.25, "owner/model")
    one = launch("status", "left").stdout
    assert re.search(r"^state +failed with code 1, ended by launch gc$", one, re.MULTILINE)
    assert re.search(r"^duration +2m 05s$", one, re.MULTILINE)


def test_status_says_what_ended_a_run_and_why_that(launch: Launch, store: RecordStore) -> None:
    record = store.create(name="dev")
    why = "logprobs differ by 3.1 on average"
    store.update(record.id, state="verified", reason="owner/model is refused", why=why)
    assert f"reason    owner/model is refused: {why}" in launch("status", "dev").stdout
    assert json.loads(launch("status", "dev", "--json").stdout)["run"]["why"] == why


def test_a_record_that_cannot_be_read_is_said(launch: Launch, store: RecordStore) -> None:
    record = store.create(name="dev")
    store.path(record.id).write_text("{")
    assert "cannot be read" in launch("status").stderr


def test_down_of_a_run_nobody_looks_after_ends_it_with_proof(launch: Launch, store: RecordStore) -> None:
    ended = subprocess.run([sys.executable, "-c", "pass"], check=True)
    assert ended.returncode == 0
    record = store.create(name="dev")
    store.update(record.id, state="arm", launch=None)
    done = launch("down", "dev", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["down"]["verified"] is True
    assert store.load(record.id).state == "verified"
    assert launch("down", "dev").returncode == 0, "twice is the same"


def test_pull_brings_home_what_there_is(launch: Launch, store: RecordStore, tmp_path: Path) -> None:
    fails(launch("pull", store.create(name="early").id), 8, "nothing to copy")
    record = store.create(name="dev")
    machine = LocalMachine(record.id, store.folder(record.id) / "machine", tmp_path / "environments")
    store.update(record.id, machine=machine.describe())
    logs = store.folder(record.id) / "machine" / "logs"
    logs.mkdir(parents=True)
    (logs / "trainer.log").write_text("step 1\n")
    done = launch("pull", "dev", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"schema", "into", "files", "bytes", "seconds", "step", "skipped"}
    assert (Path(found["into"]) / "logs" / "trainer.log").read_text() == "step 1\n"


def test_down_is_8_when_results_went_with_the_machine(
    launch: Launch, store: RecordStore, tmp_path: Path
) -> None:
    record = store.create(name="dev")
    folder = store.folder(record.id)
    machine = LocalMachine(record.id, folder / "machine", tmp_path / "environments")
    store.update(record.id, state="work", launch=None, machine=machine.describe(), url="http://127.0.0.1:1")
    (folder / "machine" / "logs").mkdir(parents=True)
    (folder / "results").write_text("something else has that name")
    fails(launch("down", "dev"), 8, "its newest results were not copied")
    assert store.load(record.id).state == "verified"


def test_down_asks_the_runs_own_launch_first(launch: Launch, store: RecordStore) -> None:
    from launcher.base.processes import ProcessId

    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    record = store.create(name="dev")
    store.update(record.id, launch=ProcessId.of(sleeper.pid))
    try:
        os.kill(sleeper.pid, signal.SIGSTOP)  # as Ctrl-Z does
        assert launch("down", "dev").returncode == 0
        assert sleeper.wait(timeout=60) == -signal.SIGTERM
    finally:
        sleeper.kill()


def test_env_prints_what_a_shell_needs(launch: Launch, store: RecordStore) -> None:
    record = store.create(name="dev")
    fails(launch("env", "dev"), 2, "has no endpoint now")
    save_token(store.folder(record.id), "secret-token-of-the-run")
    details = {"openai_env": True, "plan": {"lease_seconds": 900.0, "rented": {"gpus": "H100:4"}}}
    store.update(record.id, state="work", url="http://127.0.0.1:7453", details=details)
    done = launch("env", "dev")
    script = done.stdout + "\necho $LAUNCH_BASE_URL $LAUNCH_API_KEY $LAUNCH_MODEL $OPENAI_API_KEY"
    script += " $LAUNCH_PATIENCE_SECONDS"
    shell = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    token = "secret-token-of-the-run"
    assert shell.stdout.split() == ["http://127.0.0.1:7453/v1", token, "policy", token, "900"]
    as_json = launch("env", "dev", "--json").stdout
    assert token not in as_json
    keys = {"schema", "base_url", "api_key_file", "model", "run_id", "run_dir", "patience_seconds"}
    assert set(json.loads(as_json)) == keys
    assert (store.folder(record.id) / "token").stat().st_mode & 0o777 == 0o600


def test_g23_env_waits_for_a_run_that_starts_and_for_no_other(
    launch: Launch, store: RecordStore, tmp_path: Path
) -> None:
    record = store.create(name="dev")
    fails(launch("env", "dev"), 2, "launch env dev --wait")
    noted = tmp_path / "stderr"
    with noted.open("wb") as stderr:
        waiting = subprocess.Popen(
            [sys.executable, "-m", "launcher.cli.main", "env", "dev", "--wait"],
            env={**os.environ, "LAUNCH_HOME": str(store.runs.parent)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        looked = lambda: noted.read_text().endswith("\n") or waiting.poll() is not None  # noqa: E731
        wait_until(looked, what="it has looked")
        assert noted.read_text() == "dev is starting: waiting for its endpoint\n"
        for state in ("arm", "serve"):
            store.update(record.id, state=state)
        save_token(store.folder(record.id), "secret-token-of-the-run")
        store.update(record.id, state="connect", url="http://127.0.0.1:7453")
        said, _ = waiting.communicate(timeout=180)
    finally:
        waiting.kill()
        waiting.wait()
    assert waiting.returncode == 0
    assert "export LAUNCH_BASE_URL=http://127.0.0.1:7453/v1" in said
    # It will have none any more: nothing is waited for.
    store.update(record.id, state="pull", url=None)
    fails(launch("env", "dev", "--wait"), 2, "has no endpoint now")
    fails(launch("env", "nobody", "--wait"), 2, "there is no run 'nobody'")


def test_logs_prints_a_log_and_names_those_there_are(launch: Launch, store: RecordStore) -> None:
    record = store.create(name="dev")
    folder = store.folder(record.id)
    (folder / "launch.log").write_text("the story\n")
    (folder / "machine" / "logs").mkdir(parents=True)
    (folder / "machine" / "logs" / "trainer.log").write_text("step 1\n")
    assert launch("logs", "dev").stdout == "the story\n"
    assert launch("logs", "dev", "--which", "trainer").stdout == "step 1\n"
    fails(launch("logs", "dev", "--which", "trainr"), 2, "launch logs dev --which trainer")


def test_logs_follows_until_the_run_is_over(tmp_path: Path, store: RecordStore) -> None:
    record = store.create(name="dev")
    log = store.folder(record.id) / "launch.log"
    log.write_text("one\n")
    follower = subprocess.Popen(
        [sys.executable, "-m", "launcher.cli.main", "logs", "dev", "-f"],
        env={**os.environ, "LAUNCH_HOME": str(tmp_path / "home")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert follower.stdout is not None
    assert follower.stdout.readline() == "one\n"
    with log.open("a") as file:
        file.write("two\n")
    assert follower.stdout.readline() == "two\n"
    store.update(record.id, state="verified", ended=time.time())
    assert follower.wait(timeout=60) == 0


def test_config_shows_values_and_sources_and_no_secret(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "project" / ".env").write_text("HF_TOKEN=hf_very_secret\nLAUNCH_LEASE=5m\n")
    (tmp_path / "project" / ".env").chmod(0o644)
    (tmp_path / "project" / "launch.toml").write_text("[train]\nlearning_rate = 1e-3\n")
    done = launch("--max", "4h", "config")
    lines = {line.split()[0]: re.split(r"\s{2,}", line)[1:] for line in done.stdout.splitlines()}
    assert lines["max"] == ["4h", "--max"]
    assert lines["lease"] == ["5m", ".env: LAUNCH_LEASE"]
    assert lines["train.learning_rate"] == ["0.001", "launch.toml"]
    assert lines["HF_TOKEN"] == ["set", ".env"]
    as_json = launch("config", "--json").stdout
    assert "hf_very_secret" not in done.stdout + as_json
    assert "chmod 600" in done.stderr
    found = json.loads(as_json)
    assert set(found) == {"schema", "settings", "secrets"}
    assert found["settings"]["train.learning_rate"] == {"value": 0.001, "source": "launch.toml"}


def test_env_example_names_every_secret_that_is_read() -> None:
    example = Path(__file__).resolve().parents[2] / ".env.example"
    assert tuple(re.findall(r"^([A-Z_]+)=", example.read_text(), re.MULTILINE)) == SECRETS


def test_a_reader_that_goes_away_is_no_error(launch: Launch, tmp_path: Path) -> None:
    command = f"{sys.executable} -m launcher.cli.main config | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""


def test_g23_logs_does_not_follow_a_run_that_nobody_looks_after(launch: Launch, store: RecordStore) -> None:
    record = store.create(name="dev")
    (store.folder(record.id) / "launch.log").write_text("the story\n")
    store.update(record.id, launch=None)
    assert launch("logs", "dev", "-f").stdout == "the story\n"
