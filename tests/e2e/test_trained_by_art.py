"""openpipe-art as it is installed trains the policy of a run by our backend (B7, B8).

In an environment of its own, whose pins are not ours, over HTTP.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from runtime.shared.train_kwargs import TABLES
from runtime.tiny.chat import completion, messages
from runtime.tiny.grammar import Phrase, held_out_phrases, training_phrases
from tests.support.environment import PROGRAMS, REPOSITORY
from tests.support.foreign_environments import ART, python_with
from tests.support.launched import Launched
from tests.support.ports import free_port

pytestmark = pytest.mark.slow

FOREIGN = PROGRAMS / "foreign"
_SECONDS = 900
# Of the long form.
STEPS = 30


@dataclass
class Run:
    """A run held under `launch --art`, and what programs of other environments make of it."""

    launched: Launched
    address: str
    # A newer run may be in the same home.
    folder: Path

    @property
    def machine(self) -> Path:
        return self.folder / "machine"

    def said_of(
        self, python: Path, folder: Path, program: str, *words: str, **environ: str
    ) -> dict[str, Any]:
        """The last line of such a program."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("LAUNCH_", "PYTHON"))
        }
        done = subprocess.run(
            [python, FOREIGN / program, *words], cwd=folder, capture_output=True, text=True, timeout=_SECONDS,
            env={**kept, "LITELLM_LOCAL_MODEL_COST_MAP": "True", **environ},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}

    def trained_in(self, step: int) -> list[str]:
        """The samples of a step's batch."""
        batch = json.loads((self.machine / "steps" / f"{step:06d}" / "batch.json").read_text())
        return sorted(sample["id"] for sample in batch["samples"])

    def line_of(self, step: int) -> dict[str, Any]:
        lines = [json.loads(line) for line in (self.machine / "metrics.jsonl").open()]
        return next(line for line in lines if line["step"] == step)

    def of_this(self) -> dict[str, str]:
        """What `launch env` says of it, for a program that has our client."""
        token = (self.folder / "token").read_text().strip()
        return {
            "LAUNCH_BASE_URL": f"{self.address}/v1",
            "LAUNCH_API_KEY": token,
            "PYTHONPATH": str(REPOSITORY),
        }


@pytest.fixture(scope="module")
def run(pupil: Launched) -> Run:
    done = subprocess.run(
        [*pupil.executable, "--json", "env", "shared"],
        env={**os.environ, "LAUNCH_HOME": str(pupil.home)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = json.loads(done.stdout)
    return Run(pupil, said["base_url"].removesuffix("/v1"), Path(said["api_key_file"]).parent)


def tasks(folder: Path, count: int, held_out: int, seed: int = 0, times: int = 1) -> Path:
    """Questions of the tiny model's own kind, as a file; `times`: how often those for training are asked."""

    def one(phrase: Phrase) -> dict[str, Any]:
        said = completion("french", phrase.french)
        return {
            "messages": messages("english", "french", phrase.english),
            "right": phrase.french,
            "whole": said,
        }

    path = folder / "tasks.json"
    training, held = training_phrases(count, seed), held_out_phrases(held_out)
    path.write_text(
        json.dumps({"train": [one(it) for it in training] * times, "val": [one(it) for it in held]})
    )
    return path


def test_b07_openpipe_art_as_it_is_trains_with_its_backend_line_changed(run: Run, tmp_path: Path) -> None:
    data = tasks(tmp_path, 4, 4)
    said = run.said_of(python_with(ART), tmp_path, "art_0_5.py", str(data), "2", "1e-3", **run.of_this())
    check(run, said)
    first, last = said["steps"][0], said["steps"][-1]
    assert last == said["steps"][-2] + 2, "train_sft made a step of each batch"
    assert [run.line_of(step)["kind"] for step in (last - 1, last)] == ["supervised"] * 2
    assert {run.line_of(step)["settings"]["learning_rate"] for step in (last - 1, last)} == {1e-4}
    settings = run.line_of(first)["settings"]
    assert (settings["learning_rate"], settings["loss"]) == (1e-3, "grpo")
    # A judge's turn in each trajectory and rollouts that raised: counted, and not trained.
    assert "loss/train" in said["history"][0] and "train/samples_left_out" in said["history"][0]
    assert any("val/reward" in line for line in said["history"])
    assert said["named"] == f"policy@v{last - 2}" and said["prompted"] == 1 and said["state"] == 2
    assert "the run goes on" in said["stderr"] and run.launched.process.poll() is None
    assert not said["torch"]


def test_b09_the_table_has_the_keywords_of_the_installed_release() -> None:
    def read(path: str) -> ast.Module:
        (found,) = python_with(ART).parents[1].glob(f"lib/python*/site-packages/art/{path}")
        return ast.parse(found.read_text())

    def fields(tree: ast.Module, name: str) -> set[str]:
        (found,) = [it for it in ast.walk(tree) if isinstance(it, ast.ClassDef) and it.name == name]
        return {
            it.target.id
            for it in found.body
            if isinstance(it, ast.AnnAssign) and isinstance(it.target, ast.Name)
        }

    trains = [
        it for it in ast.walk(read("local/backend.py"))
        if isinstance(it, ast.AsyncFunctionDef) and it.name == "train"
    ]  # fmt: skip
    keywords = {argument.arg for it in trains for argument in it.args.kwonlyargs}
    assert len(keywords) == 26
    keywords |= fields(read("types.py"), "TrainConfig")
    keywords |= fields(read("dev/train.py"), "TrainConfig")
    assert keywords - set(TABLES["art"]) == set()


@pytest.mark.long
def test_b07_b08_reward_rises_on_the_tiny_model(home: Path, tmp_path: Path) -> None:
    """30 steps of the same 8 questions, 6 rollouts each: the last ten are better than the first ten."""
    port = free_port()
    launched = Launched(home, ["--art", "--port", str(port), "--name", "rises"])
    try:
        launched.wait_for_text("ready: http", 900)
        run = Run(launched, f"http://127.0.0.1:{port}", launched.run_dir)
        words = (str(tasks(tmp_path, 8, 4, times=STEPS)), str(STEPS), "2e-3")
        said = run.said_of(python_with(ART), tmp_path, "art_0_5.py", *words, **run.of_this())
        check(run, said)
        print(json.dumps({"rewards": [round(one, 3) for one in said["rewards"]]}))
        first, last = said["rewards"][:10], said["rewards"][-10:]
        errors = ((stdev(first) ** 2 + stdev(last) ** 2) / 10) ** 0.5
        assert mean(last) - mean(first) > 2 * errors
    finally:
        launched.kill_tree()


def check(run: Run, said: dict[str, Any]) -> None:
    """What was sampled is what was trained: nothing else, nothing twice, no text made into other tokens."""
    for step, sampled in said["sampled"]:
        assert run.trained_in(step) == sorted(sampled)
        check_counts(run, step, len(sampled))
    everything = [sample for _, sampled in said["sampled"] for sample in sampled]
    assert len(everything) == len(set(everything))


def check_counts(run: Run, step: int, sampled: int) -> None:
    counts = run.line_of(step)["counts"]
    assert counts["retokenised"] == 0 and counts["samples"] == sampled
    assert counts["trained"] + sum(counts["dropped"].values()) == counts["samples"]
