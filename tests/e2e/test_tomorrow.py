"""What a run has learned, used after it: exported, merged, begun with; and a run that Python holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from launcher.base.home import Home
from launcher.client import Session, connect, group
from launcher.client.failures import NotConnected
from launcher.ledger.records import RecordStore
from runtime import bootstrap
from tests.support.environment import PROGRAMS
from tests.support.launched import Launched, processes_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

PROMPT = [{"role": "user", "content": "the red cat"}]
# In fp32, over the few tokens of an answer.
EXACT = 1e-3


@pytest.fixture(scope="module", autouse=True)
def this_home(pupil: Launched) -> Any:
    """`launch` of this process and of what it starts looks where the shared run is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCH_HOME", str(pupil.home))
        yield


@dataclass(frozen=True)
class Served:
    """One answer as it was served: its ids with those of its prompt, and the logprobs of its own."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


def served(base_url: str, api_key: str, model: str) -> Served:
    with openai.OpenAI(base_url=base_url, api_key=api_key, timeout=600, max_retries=0) as client:
        answer = client.chat.completions.create(
            model=model, messages=PROMPT, max_tokens=12, temperature=0, logprobs=True,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
    choice = answer.choices[0]
    assert choice.logprobs and choice.logprobs.content and choice.model_extra and answer.model_extra
    prompt = choice.model_extra.get("prompt_token_ids") or answer.model_extra["prompt_token_ids"]
    logprobs = [token.logprob for token in choice.logprobs.content]
    return Served(prompt, choice.model_extra["token_ids"], logprobs)


def train_a_step(run: Session) -> int:
    """One step in which answers with other letters earn more; the version that it made."""
    rewards = {}
    for _ in range(8):
        rollout = run.new_rollout()
        with openai.OpenAI(base_url=run.rollout_url(rollout), api_key=run.api_key) as client:
            answer = client.chat.completions.create(model=run.model, messages=PROMPT, max_tokens=12)
        rewards[rollout] = float(len(set(answer.choices[0].message.content or "")))
    version = run.step([group("g", rewards)]).version
    assert version is not None
    return version


@pytest.fixture(scope="module")
def learned(this_home: None) -> tuple[str, Served]:
    """The shared run, found by its name, and what its newest version answers after some steps."""
    run = connect("shared")
    version = [train_a_step(run) for _ in range(3)][-1]
    return f"shared@{version}", served(run.base_url, run.api_key, f"policy@v{version}")


def export(run: str, to: Path, *options: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli.main", "export", run, "--to", str(to), "--json", *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def in_the_runtime(program: str, *words: str) -> Any:
    """What a program prints that runs with the runtime's Python and without our code."""
    python = bootstrap.ensure_environment(Home.find().environments, "cpu")
    done = subprocess.run(
        [str(python), str(PROGRAMS / "runtime" / program), *words],
        capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def close(found: list[float], wanted: list[float]) -> bool:
    return len(found) == len(wanted) and max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < EXACT


@pytest.mark.parametrize("options", [(), ("--merge",)], ids=["adapter", "merged"])
def test_b19_what_is_exported_has_the_served_logprobs(
    learned: tuple[str, Served], tmp_path: Path, options: tuple[str, ...]
) -> None:
    run, answer = learned
    said = export(run, tmp_path / "exported", *options)
    assert said["merged"] == bool(options)
    ids = json.dumps(answer.prompt + answer.ids)
    of_peft = in_the_runtime("logprobs_of.py", said["into"], ids)
    assert close(of_peft[len(answer.prompt) - 1 :], answer.logprobs)


def test_b19_a_run_begins_there_and_a_killed_python_leaves_nothing_of_it(
    learned: tuple[str, Served], pupil: Launched
) -> None:
    run, answer = learned
    program = subprocess.Popen(
        [sys.executable, PROGRAMS / "e2e" / "started_run.py", run], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    try:
        said = json.loads(program.stdout.readline())
        begun = served(said["base_url"], said["api_key"], "policy")
        assert begun.ids == answer.ids and close(begun.logprobs, answer.logprobs)
        assert connect("started").run_id == said["run"]
    finally:
        program.kill()  # -9: it can tidy nothing up
        program.wait()
        program.stdout.close()
    store = RecordStore(Home(pupil.home, pupil.home, pupil.home))
    wait_until(lambda: not store.load(said["run"]).live, 120, "the run is proven to be down")
    assert (store.load(said["run"]).proof or {})["verified"]
    assert not processes_of(said["run"])


def test_b19_a_run_that_is_not_there_is_said_with_what_is(this_home: None) -> None:
    with pytest.raises(NotConnected, match="did you mean shared"):
        connect("share")
