"""The console script from outside: errors as three lines, exit codes, and the keys of `--json`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.endpoint import keep_token
from launcher.home import Home
from launcher.machines.local import LocalMachine
from launcher.safety.records import RecordStore
from launcher.settings import SECRETS

Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """`launch("status", "--json")` in a home and a folder of its own."""
    folder = tmp_path / "project"
    folder.mkdir()
    clean = {key: value for key, value in os.environ.items() if not key.startswith("LAUNCH_")}

    def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "launcher.cli", *words],
            cwd=folder,
            env={**clean, "LAUNCH_HOME": str(tmp_path / "home"), **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


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


def test_a_missing_program_is_found_before_anything_starts(launch: Launch, tmp_path: Path) -> None:
    fails(launch("--", "no-such-program"), 3, "cannot run no-such-program", "on PATH")
    assert not (tmp_path / "home").exists()


def test_a_program_without_its_dashes_gets_them_in_the_hint(launch: Launch) -> None:
    fails(launch("python", "x.py", "--steps", "3"), 2, "Hint: launch -- python x.py --steps 3")


def test_a_script_that_is_not_executable_gets_its_python(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "project" / "x.py").write_text("print()")
    fails(launch("--", "x.py"), 3, "launch -- python x.py")
    fails(launch("--", "./x.py"), 3, "launch -- python ./x.py")


def test_nothing_behind_the_dashes_is_refused(launch: Launch) -> None:
    fails(launch("--"), 2, "no program")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--modle", "x"], "did you mean --model?"),
        (["statsu"], "did you mean status?"),
        (["--max", "4"], "90s, 15m, 4h"),
        (["--lease", "soon"], "--lease: 'soon'"),
        (["--budget", "much"], "--budget: 'much'"),
        (["--port", "80"], "1024"),
        (["--wandb", "maybe"], "online"),
        (["--set", "train.lr=1"], "--set train.lr: no such setting"),
        (["--name", "Not A Name"], "cannot be a run's name"),
        (["--gpus", "H100:4"], "not in this version"),
        (["--infra", "lambda"], "not in this version"),
        (["--max", "4h", "status"], "--max does not go with status"),
        (["logs"], "NAME"),
        (["status", "nothing-of-that-name"], "there is no run"),
        (["status", "--", "x"], "runs no program"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_2(launch: Launch, words: list[str], part: str) -> None:
    fails(launch(*words), 2, part)


def test_a_model_that_is_not_there_is_3(launch: Launch, tmp_path: Path) -> None:
    fails(launch("--model", "./nothing"), 3, "no model ./nothing")
    fails(launch("--model", "/nowhere/at/all"), 3)
    fails(launch("--model", "gpt"), 3, "owner/name")


def test_a_model_folder_is_looked_at(launch: Launch, tmp_path: Path) -> None:
    folder = tmp_path / "project" / "m"
    folder.mkdir()
    fails(launch("--model", "m"), 3, "no config.json")
    (folder / "config.json").write_text("{")
    fails(launch("--model", "m"), 3, "config.json")
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    fails(launch("--model", "m"), 3, "no *.safetensors")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(8)
    (folder / "model.safetensors").write_bytes(whole[:-1])
    fails(launch("--model", "m"), 3, "cut short")
    (folder / "model.safetensors").write_bytes(b"no")
    fails(launch("--model", "m"), 3, "not a safetensors file")
    (folder / "model.safetensors").write_bytes(whole)
    fails(launch("--model", "m"), 3, "no tokenizer")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    fails(launch("--model", "m"), 3, "no chat template")


def test_a_taken_port_is_3(launch: Launch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        fails(launch("--port", str(port)), 3, f"port {port} is taken")


def test_an_unknown_key_in_launch_toml_is_3(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "project" / "launch.toml").write_text("lerning_rate = 1")
    fails(launch(), 3, "launch.toml: lerning_rate", "train.learning_rate")


def test_a_home_that_cannot_be_written_is_3(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fails(launch("--", sys.executable, LAUNCH_HOME=str(tmp_path / "file" / "home")), 3, "cannot write under")


def test_wandb_online_without_an_account_is_3(launch: Launch, tmp_path: Path) -> None:
    fails(launch("--wandb", "online", HOME=str(tmp_path), WANDB_API_KEY=""), 3, "launch --wandb offline")


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
    "id", "name", "state", "live", "attended", "created", "ended", "ended_by", "reason", "exit_code",
    "command", "base_url", "folder", "down",
}  # fmt: skip


def test_status_shows_a_recorded_run(launch: Launch, store: RecordStore) -> None:
    record = store.create(name="dev", command=("python", "x.py"))
    (described,) = json.loads(launch("status", "--json").stdout)["runs"]
    assert set(described) == RUN_KEYS
    one = json.loads(launch("--json", "status", "dev").stdout)
    assert set(one) == {"schema", "run", "runtime"}
    assert one["run"]["id"] == record.id
    assert record.id in launch("status").stdout
    assert "python x.py" in launch("status", "dev").stdout


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
    fails(launch("pull", store.create(name="early").id), 8, "nothing to bring home")
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


def test_down_asks_the_runs_own_launch_first(launch: Launch, store: RecordStore) -> None:
    from launcher.safety.processes import ProcessId

    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    record = store.create(name="dev")
    store.update(record.id, launch=ProcessId.of(sleeper.pid))
    try:
        assert launch("down", "dev").returncode == 0
        assert sleeper.wait(timeout=5) == -signal.SIGTERM
    finally:
        sleeper.kill()


def test_env_prints_what_a_shell_needs(launch: Launch, store: RecordStore) -> None:
    record = store.create(name="dev")
    fails(launch("env", "dev"), 2, "has no endpoint now")
    keep_token(store.folder(record.id), "secret-token-of-the-run")
    details = {"openai_env": True}
    store.update(record.id, state="work", url="http://127.0.0.1:7453", details=details)
    done = launch("env", "dev")
    script = done.stdout + "\necho $LAUNCH_BASE_URL $LAUNCH_API_KEY $LAUNCH_MODEL $OPENAI_API_KEY"
    shell = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    token = "secret-token-of-the-run"
    assert shell.stdout.split() == ["http://127.0.0.1:7453/v1", token, "policy", token]
    as_json = launch("env", "dev", "--json").stdout
    assert token not in as_json
    assert set(json.loads(as_json)) == {"schema", "base_url", "api_key_file", "model", "run_id", "run_dir"}
    assert (store.folder(record.id) / "token").stat().st_mode & 0o777 == 0o600


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
        [sys.executable, "-m", "launcher.cli", "logs", "dev", "-f"],
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
    assert follower.wait(timeout=10) == 0


def test_config_shows_values_and_sources_and_no_secret(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "project" / ".env").write_text("HF_TOKEN=hf_very_secret\nLAUNCH_LEASE=5m\n")
    (tmp_path / "project" / "launch.toml").write_text("[train]\nlearning_rate = 1e-3\n")
    done = launch("--max", "4h", "config")
    lines = {line.split()[0]: re.split(r"\s{2,}", line)[1:] for line in done.stdout.splitlines()}
    assert lines["max"] == ["4h", "--max"]
    assert lines["lease"] == ["5m", ".env: LAUNCH_LEASE"]
    assert lines["train.learning_rate"] == ["0.001", "launch.toml"]
    assert lines["HF_TOKEN"] == ["set", ".env"]
    as_json = launch("config", "--json").stdout
    assert "hf_very_secret" not in done.stdout + as_json
    found = json.loads(as_json)
    assert set(found) == {"schema", "settings", "secrets"}
    assert found["settings"]["train.learning_rate"] == {"value": 0.001, "source": "launch.toml"}


def test_env_example_names_every_secret_that_is_read() -> None:
    example = Path(__file__).resolve().parents[2] / ".env.example"
    assert tuple(re.findall(r"^([A-Z_]+)=", example.read_text(), re.MULTILINE)) == SECRETS


def test_a_reader_that_goes_away_is_no_error(launch: Launch, tmp_path: Path) -> None:
    command = f"{sys.executable} -m launcher.cli config | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""
