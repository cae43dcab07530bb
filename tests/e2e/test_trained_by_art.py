"""openpipe-art as it is installed trains the policy of a run: its newest release, and that of 2025 (B7, B8).

Each in an environment of its own, whose pins are not ours, over HTTP; both on one run, one after the other.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from runtime.shared.batch import Batch, read_batch
from runtime.shared.train_kwargs import TABLES
from runtime.tiny.chat import completion, messages
from runtime.tiny.grammar import Phrase, held_out_phrases, training_phrases
from tests.e2e.conftest import make_home
from tests.support.environment import PROGRAMS, REPOSITORY
from tests.support.foreign_environments import ART, ART_OF_2025, python_with
from tests.support.launched import Launched
from tests.support.ports import free_port

pytestmark = pytest.mark.slow

FOREIGN = PROGRAMS / "foreign"
TINY_TOKENIZER = REPOSITORY / "runtime" / "tiny" / "model" / "tokenizer.json"
_SECONDS = 900
# Of the long form.
STEPS = 30
# What the tiny model ends an answer with.
END = "<|im_end|>"


@dataclass
class Run:
    """A run held under `launch --art`, and what programs of other environments make of it."""

    launched: Launched
    address: str

    @property
    def machine(self) -> Path:
        return self.launched.run_dir / "machine"

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
        token = (self.launched.run_dir / "token").read_text().strip()
        return {
            "LAUNCH_BASE_URL": f"{self.address}/v1",
            "LAUNCH_API_KEY": token,
            "PYTHONPATH": str(REPOSITORY),
        }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    port = free_port()
    home = make_home(tmp_path_factory.mktemp("art") / "home")
    launched = Launched(home, ["--art", "--name", "art", "--port", str(port)])
    try:
        launched.wait_for_text("ready: http", 900)
        yield Run(launched, f"http://127.0.0.1:{port}")
        launched.interrupt()
        assert launched.wait(900) == 130
    finally:
        launched.kill_tree()


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


def test_b08_openpipe_art_of_2025_trains_over_its_own_routes_without_a_key(run: Run, tmp_path: Path) -> None:
    data = tasks(tmp_path, 2, 2, seed=1)
    said = run.said_of(python_with(ART_OF_2025), tmp_path, "art_0_4.py", str(data), "1", "1e-3", run.address)
    check_texts(run, said)
    settings = run.line_of(said["steps"][0])["settings"]
    assert (settings["learning_rate"], settings["kl_beta"]) == (1e-3, 0.0)
    # httpx shows no body: the refusal is in the line that it shows.
    assert "advantage_balance: an advantage is a reward less its group's mean here" in said["refused"]
    scores = [json.loads(line) for line in (run.machine / "validations.jsonl").open()]
    assert [one["step"] for one in scores if one["compile"] == "agent-001"] == said["steps"]
    assert not said["torch"]


def test_b09_the_table_has_the_keywords_of_the_installed_releases() -> None:
    def read(requirements: tuple[str, ...], path: str) -> ast.Module:
        (found,) = python_with(requirements).parents[1].glob(f"lib/python*/site-packages/art/{path}")
        return ast.parse(found.read_text())

    def fields(tree: ast.Module, name: str) -> set[str]:
        (found,) = [it for it in ast.walk(tree) if isinstance(it, ast.ClassDef) and it.name == name]
        return {
            it.target.id
            for it in found.body
            if isinstance(it, ast.AnnAssign) and isinstance(it.target, ast.Name)
        }

    trains = [
        it for it in ast.walk(read(ART, "local/backend.py"))
        if isinstance(it, ast.AsyncFunctionDef) and it.name == "train"
    ]  # fmt: skip
    keywords = {argument.arg for it in trains for argument in it.args.kwonlyargs}
    assert len(keywords) == 26
    for release in (ART, ART_OF_2025):
        keywords |= fields(read(release, "types.py"), "TrainConfig")
        keywords |= fields(read(release, "dev/train.py"), "TrainConfig")
    assert keywords - set(TABLES["art"]) == set()


@pytest.mark.long
@pytest.mark.parametrize("release", ["0.5.18", "0.4.11"])
def test_b07_b08_reward_rises_on_the_tiny_model(release: str, home: Path, tmp_path: Path) -> None:
    """30 steps of the same 8 questions, 6 rollouts each: the last ten are better than the first ten."""
    port = free_port()
    launched = Launched(home, ["--art", "--port", str(port), "--name", "rises"])
    try:
        launched.wait_for_text("ready: http", 900)
        run = Run(launched, f"http://127.0.0.1:{port}")
        words = (str(tasks(tmp_path, 8, 4, times=STEPS)), str(STEPS), "2e-3")
        if release == "0.5.18":
            said = run.said_of(python_with(ART), tmp_path, "art_0_5.py", *words, **run.of_this())
            check(run, said)
        else:
            said = run.said_of(python_with(ART_OF_2025), tmp_path, "art_0_4.py", *words, run.address)
            check_texts(run, said)
        print(json.dumps({"release": release, "rewards": [round(one, 3) for one in said["rewards"]]}))
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


def check_texts(run: Run, said: dict[str, Any]) -> None:
    """The same of a client that keeps no names: each text in its group, and what it earned.

    By the ids that were trained, as the engine makes text of them: a special token in the midst is not in it,
    nor is half a letter at the end.
    """
    tokenizer = Tokenizer.from_file(str(TINY_TOKENIZER))
    trained = []
    for step, told in said["said"]:
        batch = read_batch(run.machine / "steps" / f"{step:06d}")
        in_step = Counter(texts_of(batch, tokenizer))
        with_client = Counter((group, text, round(reward, 4)) for group, text, reward in told)
        assert in_step == with_client, (
            f"step {step}: only the client has {[*(with_client - in_step).elements()]!r}, "
            f"only the step {[*(in_step - with_client).elements()]!r}"
        )
        check_counts(run, step, len(told))
        trained += run.trained_in(step)
    assert len(trained) == len(set(trained))


def texts_of(batch: Batch, tokenizer: Tokenizer) -> Iterator[tuple[str, str, float]]:
    """Of each answer its group, the text that a client was given of it, and its reward."""
    end = tokenizer.token_to_id(END)
    for row in range(batch.sequences):
        tokens = batch.tokens[batch.span(row)].tolist()
        member = batch.member[row]
        group = batch.meta["groups"][batch.group[member]]["id"]
        for turn in batch.meta["samples"][row]["turns"]:
            asked, answered = tokens[: turn["start"]], tokens[turn["start"] : turn["end"]]
            stream = DecodeStream(ids=asked, skip_special_tokens=True)
            said = answered[:-1] if answered[-1] == end else answered
            text = "".join(stream.step(tokenizer, one) or "" for one in said)
            yield group, text, round(float(batch.reward[member]), 4)


def check_counts(run: Run, step: int, sampled: int) -> None:
    counts = run.line_of(step)["counts"]
    assert counts["retokenised"] == 0 and counts["samples"] == sampled
    assert counts["trained"] + sum(counts["dropped"].values()) == counts["samples"]
