"""DSPy that is newer than the tested one, or lacks a name: told once, and what still works works."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import dspy
import pytest

from launcher.client.dspy import dspy_compat
from tests.support.environment import REPOSITORY
from tests.support.small_run import TOKEN, SmallRun

TRAIN = """
import dspy
from launcher.client import GRPO, PolicyLM, connect
program = dspy.Predict("english -> french")
program.set_lm(PolicyLM(connect()))
data = [dspy.Example(english=f"word {i}", french="mot").with_inputs("english") for i in range(2)]
metric = lambda example, prediction, trace=None: float(len(prediction.french))
optimizer = GRPO(metric, num_train_steps=1, num_dspy_examples_per_grpo_step=2, num_rollouts_per_grpo_step=2)
optimizer.compile(program, trainset=data)
print("trained", optimizer.report.trained)
"""


@pytest.mark.process
def test_d_every_name_that_is_imported_from_dspy_is_in_the_list() -> None:
    used = set[str]()
    for path in (REPOSITORY / "launcher").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dspy":
                used |= {f"{node.module}:{it.name}" for it in node.names}
    assert used <= {*dspy_compat.REQUIRED_NAMES, *dspy_compat.TRAINING_JOB_NAMES}


def test_d_the_installed_dspy_is_the_tested_one_and_has_every_name() -> None:
    assert metadata.version("dspy") == dspy_compat.TESTED_VERSION
    assert list(dspy_compat.compatibility_warnings(dspy_compat.TESTED_VERSION)) == []


@pytest.mark.parametrize(
    ("version", "newer"), [("3.4.2rc1", True), ("3.10", True), ("3.4.1rc1", False), ("", False)]
)
def test_d_a_candidate_of_a_newer_version_is_newer(version: str, newer: bool) -> None:
    assert bool(list(dspy_compat.compatibility_warnings(version))) == newer


def test_d_a_dspy_that_was_copied_says_its_version_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(dspy_compat.metadata, "version", missing)
    assert dspy_compat.installed_version() == dspy.__version__ == dspy_compat.TESTED_VERSION


@pytest.mark.process
@pytest.mark.parametrize("lacks", ["", "ReinforceJob"], ids=["relabelled 3.9", "without a name"])
def test_d_a_newer_dspy_is_told_once_and_tried(run: SmallRun, tmp_path: Path, lacks: str) -> None:
    assert dspy.__file__ is not None
    shutil.copytree(Path(dspy.__file__).parent, tmp_path / "dspy")
    (tmp_path / "dspy-3.9.0.dist-info").mkdir()
    (tmp_path / "dspy-3.9.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: dspy\nVersion: 3.9.0\n"
    )
    for path in (tmp_path / "dspy").rglob("*.py") if lacks else ():  # called otherwise in all of it
        path.write_text(path.read_text().replace(lacks, "TrainingByReward"))
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    environ |= {"LAUNCH_BASE_URL": run.base_url, "LAUNCH_API_KEY": TOKEN}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "trained 4"
    told = [line for line in done.stderr.splitlines() if line.startswith("slipway: DSPy")]
    assert told[0] == "slipway: DSPy 3.9.0 is newer than 3.4.1, with which this was tested: it is tried"
    assert len(told) == 1 + bool(lacks)
    assert not lacks or "has no dspy.clients.provider:ReinforceJob: its own BootstrapFinetune" in told[1]
