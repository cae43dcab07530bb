"""What is trained is what the engine sampled: 400 rollouts in 32 threads, and the engine killed among them.

The measure is a tap of the test's own on the engine's socket, which shares no code with the runtime. The
tensors are read from the files the trainer read.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
from safetensors.numpy import load_file

from launcher.client.request_bodies import StepSettings
from launcher.client.session import Session, connect
from runtime.shared.schema import Group, Member
from runtime.shared.statuses import StepStatus
from tests.e2e.conftest import make_home
from tests.support.environment import runtime_python
from tests.support.launched import Launched, processes_of
from tests.support.ports import free_port
from tests.support.tap import Tap
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ROLLOUTS = 400
THREADS = 32
A_STEP = 50
GROUP = 5
# Once so many answers have come, the engine is killed under those on their way.
KILLED_AT = 224

Key = tuple[int, int]


@dataclass(frozen=True)
class Sampled:
    """What the engine said over its socket."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


def reward_of(number: int) -> dict[str, Any]:
    """Rewards with variance in every group; now and then there is none, or none that is a number."""
    strange = {7: None, 17: math.nan, 27: math.inf}
    reward = strange.get(number % 50, float(number % GROUP))
    return {"reward": reward, "failure": "the metric failed" if reward is None else None}


@dataclass
class Load:
    """The user's program: threads that roll out, some of them for two turns."""

    session: Session
    kill_engine: Any
    answers: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.client = openai.OpenAI(
            base_url=self.session.base_url, api_key=self.session.api_key, timeout=600, max_retries=0
        )

    def rollout(self, number: int) -> str:
        name = f"r{number}"
        messages: list[Any] = [{"role": "user", "content": f"rollout {number}: the red cat"}]
        for turn in range(2 if number % GROUP == 0 else 1):
            answer = self.client.chat.completions.create(
                model="policy",
                messages=messages,
                max_tokens=24 if turn == 0 and number % GROUP == 0 else 8,
                temperature=0 if number % 100 == 3 else 1.0,
                extra_headers={"x-slipway-rollout": name},
            )
            said = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and the dog"}]
            with self.lock:
                self.answers += 1
                if self.answers == KILLED_AT:
                    self.kill_engine()
        return name

    def groups(self, numbers: range) -> list[Group]:
        members = [Member(rollout=f"r{number}", **reward_of(number)) for number in numbers]
        return [
            Group(id=f"g{numbers.start + start}", members=members[start : start + GROUP])
            for start in range(0, len(members), GROUP)
        ]


def engine_of(launched: Launched) -> psutil.Process:
    """The vLLM server process of the run: not the tether that holds it, nor the core it forked."""
    words = {process: process.cmdline() for process in processes_of(launched.run_id)}
    engines = [
        process
        for process, line in words.items()
        if "runtime.engine.server" in line and "runtime.tether" not in line
    ]
    (server,) = [one for one in engines if one.ppid() not in {other.pid for other in engines}]
    return server


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """`launch` without a command, until Ctrl-C."""
    runtime_python()
    home = make_home(tmp_path_factory.mktemp("exact") / "home")
    running = Launched(home, ["--name", "exact", "--port", str(free_port())])
    try:
        yield running
        running.interrupt()
        assert running.wait(900) == 130
    finally:
        if running.process.poll() is None:
            running.kill_tree()


@pytest.fixture(scope="module")
def tap(launched: Launched) -> Iterator[Tap]:
    """The tap, in its place before the engine is; the run is ready."""
    wait_until(lambda: any(launched.home.glob("runs/*/machine/runtime.json")), 180, "the runtime starts")
    config = json.loads((launched.run_dir / "machine" / "runtime.json").read_text())
    tap = Tap(Path(config["socket_dir"]) / "engine-0.sock").start()
    try:
        launched.wait_for_text("ready: http", 900)
        yield tap
    finally:
        tap.stop()


def session_of(launched: Launched) -> Session:
    done = subprocess.run(
        [*launched.executable, "--json", "env", "exact"],
        env={**os.environ, "LAUNCH_HOME": str(launched.home)},
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout)
    return connect(said["base_url"], Path(said["api_key_file"]).read_text().strip())


def run_load(load: Load) -> list[StepStatus]:
    """Roll out and train by turns: while one step trains, the rollouts of the next are sampled."""
    steps: list[StepStatus] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, ROLLOUTS, A_STEP):
            numbers = range(start, start + A_STEP)
            assert len(set(pool.map(load.rollout, numbers))) == A_STEP
            if steps:
                steps[-1] = load.session.wait(steps[-1].id)
            kept = StepSettings(overlong="keep")  # most answers are cut off
            steps.append(load.session.step(load.groups(numbers), wait=False, settings=kept))
    steps[-1] = load.session.wait(steps[-1].id)
    return steps


def what_the_engine_said(tap: Tap) -> tuple[dict[Key, list[Sampled]], Counter[Key]]:
    """By rollout and turn: the answers that came whole, and how often each was asked for."""
    answers: dict[Key, list[Sampled]] = defaultdict(list)
    asked: Counter[Key] = Counter()
    for heard in tap.heard():
        messages = heard.body["messages"]
        key = (int(messages[0]["content"].split()[1].rstrip(":")), len(messages) // 2)
        asked[key] += 1
        if heard.answer is not None:
            (choice,) = heard.answer["choices"]
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
            answers[key].append(Sampled(heard.answer["prompt_token_ids"], choice["token_ids"], logprobs))
    return answers, asked


def check_batch(folder: Path, answers: dict[Key, list[Sampled]]) -> list[Key]:
    """Every sequence of a step's tensors is what the engine said; the rollouts and turns it is made of."""
    arrays, meta = load_file(folder / "batch.safetensors"), json.loads((folder / "batch.json").read_text())
    trained: list[Key] = []
    for row, (start, end) in enumerate(zip(arrays["offsets"], arrays["offsets"][1:], strict=False)):
        tokens, flags = arrays["tokens"][start:end], arrays["sampled"][start:end]
        number = int(meta["samples"][row]["rollout"].removeprefix("r"))
        expected, logprobs = np.zeros_like(flags), np.zeros(len(flags), np.float32)
        for turn in range(2):
            for said in answers.get((number, turn), []):
                place = slice(len(said.prompt), len(said.prompt) + len(said.ids))
                if tokens[: place.stop].tolist() == said.prompt + said.ids and flags[place].all():
                    expected[place], logprobs[place] = 1, said.logprobs
                    trained.append((number, turn))
        assert flags.any() and (flags == expected).all(), (folder.name, row)
        assert (arrays["logprobs"][start:end] == logprobs).all(), (folder.name, row)
        assert arrays["member"][row] in range(len(arrays["reward"]))
        assert arrays["reward"][arrays["member"][row]] == number % GROUP
    assert len(trained) == meta["counts"]["trained"]
    return trained


def test_what_is_trained_is_what_the_engine_sampled_under_load_and_over_its_restart(
    launched: Launched, tap: Tap
) -> None:
    machine = launched.run_dir / "machine"
    first = engine_of(launched)
    load = Load(session_of(launched), first.kill)
    steps = run_load(load)
    assert engine_of(launched).pid != first.pid

    turns = ROLLOUTS + ROLLOUTS // GROUP
    answers, asked = what_the_engine_said(tap)
    assert load.answers == turns == len(answers)
    assert {len(said) for said in answers.values()} == {1}  # whole answers: one each
    assert sum(asked.values()) > turns  # some were cut off by the kill, and asked for again

    journal = [line for file in machine.glob("samples/*.jsonl") for line in map(json.loads, file.open())]
    assert sum(len(line.get("samples", ())) for line in journal) == turns

    trained = [
        key
        for folder in sorted(machine.glob("steps/[0-9]*/batch.json"))
        for key in check_batch(folder.parent, answers)
    ]
    assert len(trained) == len(set(trained)) > 0.8 * turns
    for step in steps:
        assert step.state == "published", step
        assert step.counts.retokenised == 0
        assert step.counts.trained + sum(step.counts.dropped.values()) == step.counts.samples
    counts = [step.counts for step in steps]
    assert sum(count.members for count in counts) == ROLLOUTS
    assert sum(count.samples for count in counts) == turns
    dropped = sum((Counter(count.dropped) for count in counts), Counter())
    assert dropped["the metric failed"] == ROLLOUTS // 50
    assert dropped["reward not finite"] == 2 * ROLLOUTS // 50
    assert dropped["greedy"] == ROLLOUTS // 100
    assert sum(count.turns_joined + count.sealed for count in counts) > 0
