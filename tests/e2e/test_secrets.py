"""One real run with secrets about: they reach who needs them, and stand in no argument, file or log."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import make_home
from tests.support.canaries import CommandLines, in_files
from tests.support.environment import PROGRAMS, REPOSITORY
from tests.support.launched import Launched, processes_of
from tests.support.ports import free_port
from tests.support.trackio_files import runs_in
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

HF, WANDB = "hf_canary+/of-the-hub-0123", "canary+/of-the-board-0123"
# Another service's keys: one beside ours in .env, one in the user's shell.
FILE, SHELL = "canary+/of-another-service-0123", "canary+/of-the-shell-0123"

PROGRAM = PROGRAMS / "e2e" / "train_and_wait.py"


@dataclass
class Seen:
    """What was seen of the run while it lived and after."""

    launched: Launched
    folder: Path
    token: str
    code: int
    lines: CommandLines
    # Process by its module or program → which of the canaries are in its environment.
    environments: dict[str, set[str]]


def _holder(process: psutil.Process) -> str:
    command = process.cmdline()
    modules = [word for word in command if word.startswith(("runtime.", "launcher."))]
    return modules[-1] if modules and modules != ["runtime.tether"] else Path(command[0]).name


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("secrets")
    env_file = folder / ".env"
    env_file.write_text(f"HF_TOKEN={HF}\nWANDB_API_KEY={WANDB}\nOTHER_API_KEY={FILE}\n")
    env_file.chmod(0o600)
    environ = {"SHELL_API_KEY": SHELL, "PYTHONPATH": str(REPOSITORY), "LAUNCH_WANDB": "offline"}
    environ |= {"LAUNCH_TRACKIO": "1"}
    with CommandLines() as lines:
        launched = Launched(
            make_home(folder / "home"),
            ["--debug", "--port", str(free_port()), "--", sys.executable, str(PROGRAM), "SHELL_API_KEY"],
            cwd=folder,
            environ=environ,
        )
        try:
            launched.wait_for_text("ready: http", 900)
            token = (launched.run_dir / "token").read_text().strip()
            trained = launched.run_dir / "results" / "trained"
            wait_until(lambda: trained.exists() or launched.process.poll() is not None, 600, "a step")
            environments: dict[str, set[str]] = {}
            trackio = [
                it for it in psutil.Process(launched.process.pid).children() if "trackio" in _holder(it)
            ]
            for process in [*processes_of(launched.run_id), *trackio]:
                values = " ".join(process.environ().values())
                held = {canary for canary in (HF, WANDB, FILE, SHELL) if canary in values}
                environments.setdefault(_holder(process), set()).update(held)
            trained.with_name("looked-at").touch()
            code = launched.wait(900)
            yield Seen(launched, folder, token, code, lines, environments)
        finally:
            launched.kill_tree()


def test_the_run_trained_and_the_program_was_given_no_secret_of_dotenv(seen: Seen) -> None:
    assert seen.code == 0, seen.launched.stderr


def test_g14_each_process_has_the_secrets_it_needs_and_no_other(seen: Seen) -> None:
    holders = seen.environments
    assert holders["runtime.gateway.gateway"] == set()
    assert holders["runtime.engine.server"] == {HF}
    assert {HF, WANDB} in holders.values(), "the trainer"
    of_runtime = [held for name, held in holders.items() if name.startswith("runtime.")]
    assert len(of_runtime) >= 3
    assert not any({FILE, SHELL} & held for held in of_runtime)
    assert not any({FILE} & held for held in holders.values())
    assert holders["launcher.results.trackio_log"] == set()


def test_g14_no_secret_was_ever_in_a_command_line(seen: Seen) -> None:
    assert seen.lines.looks > 100
    assert any(b"runtime.gateway.gateway" in line for line in seen.lines.seen)
    assert seen.lines.holding([HF, WANDB, FILE, SHELL, seen.token]) == []


def test_g14_no_secret_is_in_any_file_of_the_run(seen: Seen) -> None:
    (seen.folder / ".env").unlink(missing_ok=True)
    home = seen.launched.run_dir / "results" / "wandb"
    assert list(home.glob("offline-run-*/*.wandb")), "wandb wrote its files, and they are home"
    assert in_files([seen.folder], [HF, WANDB, FILE, SHELL, seen.token]) == []


def test_each_committed_step_is_in_trackio(seen: Seen) -> None:
    results = seen.launched.run_dir / "results"
    lines = [json.loads(line) for line in (results / "metrics.jsonl").read_text().splitlines()]
    rows = runs_in(results / "trackio")[seen.launched.run_id]["rows"]
    assert lines and [(it["step"], it["train/reward"]) for it in rows if "train/step" in it] == [
        (line["step"], line["metrics"]["reward"]) for line in lines
    ]
