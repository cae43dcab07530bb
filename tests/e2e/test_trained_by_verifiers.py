"""The installed verifiers on a real engine and trainer: its train client, and our example."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from launcher.client import Session, connect
from tests.support.agent_world import said_by
from tests.support.environment import REPOSITORY
from tests.support.foreign_environments import VERIFIERS, python_with
from tests.support.launched import Launched
from tests.support.ports import free_port
from tests.support.step_tokens import trained_tokens

pytestmark = pytest.mark.slow

EXAMPLES = REPOSITORY / "examples"
TOKENIZER = REPOSITORY / "runtime" / "tiny" / "model"
TURNS = 2


@pytest.fixture(scope="module")
def run(pupil: Launched) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCH_HOME", str(pupil.home))
        yield connect("shared")


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """That of verifiers, in a home of its own: it makes a folder there for each rollout."""
    found = python_with(VERIFIERS)
    (tmp_path / "theirs").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "theirs"))
    return str(found)


def machine_of(pupil: Launched, run: Session) -> Path:
    return pupil.home / "runs" / run.run_id / "machine"  # a newer run may be beside it


def recorded(machine: Path, rollout: str) -> list[dict[str, Any]]:
    """The journal's lines of a rollout, in order."""
    lines = [json.loads(line) for file in sorted(machine.glob("samples/*.jsonl")) for line in file.open()]
    return [line for line in lines if "samples" in line and line["tags"]["rollout"] == rollout]


def test_verifiers_train_client_gets_the_ids_and_logprobs_that_are_recorded_and_trained(
    pupil: Launched, run: Session, python: str
) -> None:
    program = "verifiers_train_client.py"
    said = said_by(VERIFIERS, program, str(TOKENIZER), base_url=run.base_url, api_key=run.api_key)
    machine, names, counts = machine_of(pupil, run), said["rollouts"], said["counts"]
    joined = 0
    for name in names:
        turns, lines = said["turns"][name], recorded(machine, name)
        assert len(turns) == len(lines) == TURNS
        for turn, line in zip(turns, lines, strict=True):
            (sample,) = line["samples"]
            assert line["prompts"] == [turn["prompt"]] and sample["unscorable"] is None
            assert sample["completion_ids"] == turn["completion"] and turn["completion"]
            assert sample["logprobs"] == turn["logprobs"]
        first, second = turns
        before = first["prompt"] + first["completion"]
        whole = lines[0]["samples"][0]["finish_reason"] == "stop"
        joined += whole and second["prompt"][: len(before)] == before
    assert counts["trained"] == counts["samples"] == TURNS * len(names) and not counts["dropped"]
    # verifiers renders the whole conversation anew: a text may be other ids then than were sampled.
    assert counts["turns_joined"] == joined and counts["sealed"] == len(names) - joined
    assert set(counts["sealed_by"]) <= {"cut off", "history rewritten", "another conversation"}
    trained = trained_tokens(machine, names)
    sampled = [[*chain(*(turn["completion"] for turn in said["turns"][name]))] for name in names]
    assert len(trained) == sum(map(len, sampled))
    assert sorted(trained) == sorted(chain(*sampled))


@pytest.mark.long
def test_the_example_of_an_environment_takes_a_step_where_it_is_copied(
    run: Session, python: str, tmp_path: Path
) -> None:
    """In another folder, with the environment beside it, and fewer rollouts."""
    source, sizes = (EXAMPLES / "verifiers_env.py").read_text(), "STEPS, TASKS, ROLLOUTS = 10, 8, 8"
    assert sizes in source
    (tmp_path / "verifiers_env.py").write_text(source.replace(sizes, "STEPS, TASKS, ROLLOUTS = 1, 4, 8"))
    (tmp_path / "verifiers_french.py").write_bytes((EXAMPLES / "verifiers_french.py").read_bytes())
    environ = {
        "PYTHONPATH": str(REPOSITORY),
        "HOME": str(tmp_path / "theirs"),
        "LAUNCH_BASE_URL": run.base_url,
        "LAUNCH_API_KEY": run.api_key,
    }
    done = subprocess.run(
        [python, "verifiers_env.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"^[01]\.\d+$", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^held-out: \S+ → \S+ of 50 tasks$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.long
def test_an_environment_of_verifiers_is_learnt_in_three_minutes(home: Path, tmp_path: Path) -> None:
    """By more than two standard errors of a share of its held-out tasks."""
    program = [
        *("env", f"HOME={tmp_path}", f"PYTHONPATH={REPOSITORY}"),
        *(str(python_with(VERIFIERS)), str(EXAMPLES / "verifiers_env.py")),
    ]
    launched = Launched(home, ["--port", str(free_port()), "--", *program])
    try:
        assert launched.wait(900) == 0, launched.stdout + launched.stderr
    finally:
        launched.kill_tree()
    found = re.search(r"^held-out: (\S+) → (\S+) of (\d+)", launched.stdout, re.MULTILINE)
    assert found is not None, launched.stdout
    before, after, tasks = float(found[1]), float(found[2]), int(found[3])
    error = ((before * (1 - before) + after * (1 - after)) / tasks) ** 0.5
    assert after - before > 2 * error, (before, after, error)
