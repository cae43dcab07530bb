"""A held endpoint is a workbench: three programs one after another on one run, each a process of its own.

The first compiles twice and writes down what its two versions answer. The second trains something else while
those are asked by name. The third is DSPy's BetterTogether, whose candidates are scored again.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.environment import PROGRAMS, REPOSITORY
from tests.support.launched import Launched
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

PROGRAM = PROGRAMS / "e2e" / "on_the_workbench.py"
PROGRAM_SECONDS = 900
FIRST_STEPS, SECOND_STEPS, THIRD_STEPS = 2, 6, 4
# The second's rollouts of this step wait until the first's versions were asked once.
HELD_STEP = 4
# Of a logprob: asked again it is within the first of this, and of other weights some are further off than the
# second, whatever the greedy texts are. A score is 100 times the mean of an answer's sum of them, rounded.
SAME, OTHER = 1e-3, 1e-2
SAME_SCORE = 0.05

# The text that answers a greedy request, and the logprobs of its tokens.
Answer = tuple[str | None, list[float]]


@dataclass
class Program:
    """A program of the user's under way, its output in files."""

    process: subprocess.Popen[bytes]
    result: Path
    said: Path

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def finished(self) -> dict[str, Any]:
        """What it says of itself, once it has ended well."""
        assert self.process.wait(PROGRAM_SECONDS) == 0, self.said.read_text()
        return json.loads(self.result.read_text())


@dataclass
class Workbench:
    """The held endpoint as its user has it: `eval "$(launch env shared)"`, and then any program."""

    endpoint: Launched
    folder: Path
    started: list[Program] = field(default_factory=list)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What the trainer measured in each step of the run so far."""
        lines = (self.machine / "metrics.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def machine(self) -> Path:
        return self.endpoint.run_dir / "machine"

    @functools.cached_property
    def variables(self) -> dict[str, str]:
        """What `launch env` prints."""
        done = subprocess.run(
            [*self.endpoint.executable, "env", "shared"],
            env={**os.environ, "LAUNCH_HOME": str(self.endpoint.home)},
            capture_output=True,
            text=True,
            check=True,
        )
        pairs = (line.removeprefix("export ").partition("=") for line in done.stdout.splitlines())
        return {name: value.strip("'\"") for name, _, value in pairs}

    def start(self, *words: str) -> Program:
        number = len(self.started) + 1
        result, said = self.folder / f"{number}.json", self.folder / f"{number}.log"
        metric, seed, steps, *options = words
        with said.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, PROGRAM, metric, seed, steps, result, *options],
                cwd=self.folder,
                env={**os.environ, **self.variables, "PYTHONPATH": str(REPOSITORY)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.started.append(Program(process, result, said))
        return self.started[-1]

    def ask(self, bodies: list[dict[str, Any]]) -> list[Answer]:
        """What answers, asked one after the other by any OpenAI client."""
        door, token = self.variables["LAUNCH_BASE_URL"], self.variables["LAUNCH_API_KEY"]
        with openai.OpenAI(base_url=door, api_key=token) as client:
            choices: list[Any] = [client.chat.completions.create(**body).choices[0] for body in bodies]
        return [(it.message.content, [token.logprob for token in it.logprobs.content]) for it in choices]


@dataclass(frozen=True)
class Second:
    """The second program's end; `heard`: what the first's versions answered, each time they were asked."""

    result: dict[str, Any]
    heard: list[list[Answer]]
    # Of the second's own steps, when all of them had answered for the first time.
    steps_when_first_heard: int


@pytest.fixture(scope="module")
def bench(endpoint: Launched, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    bench = Workbench(endpoint, tmp_path_factory.mktemp("workbench"))
    try:
        yield bench
    finally:
        for program in bench.started:
            if not program.is_over:
                program.process.kill()
                program.process.wait()


@pytest.fixture(scope="module")
def first(bench: Workbench) -> dict[str, Any]:
    return bench.start("letters", "1", str(FIRST_STEPS), "--compiles", "2").finished()


@pytest.fixture(scope="module")
def second(bench: Workbench, first: dict[str, Any]) -> Second:
    before = first["compiles"][-1]["version"]
    bodies = [exchange["body"] for exchange in first["exchanges"]]
    asked = bench.folder / "asked"
    options = ("--hold-at", str(HELD_STEP), "--until", str(asked))
    program = bench.start("brevity", "2", str(SECOND_STEPS), *options)
    heard: list[list[Answer]] = []

    def steps() -> int:
        return bench.metrics[-1]["step"] - before

    def ask_once_more() -> bool:
        heard.append(bench.ask(bodies))
        return program.is_over

    wait_until(lambda: program.is_over or steps() >= HELD_STEP - 1, PROGRAM_SECONDS, program.said.read_text)
    assert not program.is_over, program.said.read_text()
    ask_once_more()
    steps_when_first_heard = steps()
    asked.touch()
    wait_until(ask_once_more, PROGRAM_SECONDS, program.said.read_text)
    return Second(program.finished(), heard, steps_when_first_heard)


@pytest.fixture(scope="module")
def third(bench: Workbench, second: Second) -> dict[str, Any]:
    return bench.start("vowels", "3", str(THIRD_STEPS), "--together").finished()


def answers(exchanges: list[dict[str, Any]]) -> list[Answer]:
    return [(exchange["text"], exchange["logprobs"]) for exchange in exchanges]


def distance(one: list[Answer], other: list[Answer]) -> float:
    """Between the logprobs that are furthest apart; of other texts infinite."""
    if [text for text, _ in one] != [text for text, _ in other]:
        return math.inf
    pairs = zip(one, other, strict=True)
    return max(abs(a - b) for (_, these), (_, those) in pairs for a, b in zip(these, those, strict=True))


def test_g21_each_of_three_programs_on_a_held_endpoint_trains_all_of_its_steps(
    bench: Workbench, first: dict[str, Any], second: Second, third: dict[str, Any]
) -> None:
    asked = [(it, FIRST_STEPS) for it in first["compiles"]]
    asked += [(it, SECOND_STEPS) for it in second.result["compiles"]]
    asked += [(it, THIRD_STEPS) for it in third["compiles"]]
    at = asked[0][0]["after_step"]
    for compiled, steps in asked:
        assert compiled["after_step"] == at, "nobody has trained in between"
        measured = [line["counts"] for line in bench.metrics if at < line["step"] <= compiled["version"]]
        assert len(measured) == compiled["steps"] == steps
        assert all(counts["trained"] for counts in measured)
        assert sum(counts["trained"] for counts in measured) == compiled["trained"]
        at = compiled["version"]
    assert bench.metrics[-1]["step"] == at
    assert len({compiled["compile"] for compiled, _ in asked}) == len(asked) == 4


def test_c55_what_one_program_was_compiled_to_answers_by_name_while_another_trains(
    bench: Workbench, first: dict[str, Any], second: Second
) -> None:
    recorded = answers(first["exchanges"])
    assert HELD_STEP - 1 <= second.steps_when_first_heard < SECOND_STEPS
    assert len(second.heard) > 1
    assert max(distance(heard, recorded) for heard in second.heard) < SAME
    for compiled in first["compiles"]:
        own = [it for it in first["exchanges"] if it["body"]["model"] == compiled["model"]]
        newest = bench.ask([{**it["body"], "model": "policy"} for it in own])
        assert distance(newest, answers(own)) > OTHER, "the newest answers otherwise"


def test_c55_after_the_third_program_the_firsts_versions_are_loaded_again_and_the_same(
    bench: Workbench, first: dict[str, Any], third: dict[str, Any]
) -> None:
    heard = bench.ask([exchange["body"] for exchange in first["exchanges"]])
    assert distance(heard, answers(first["exchanges"])) < SAME
    lines = map(json.loads, (bench.machine / "publications.jsonl").read_text().splitlines())
    recalled = {line["step"] for line in lines if line["outcome"] == "recalled"}
    assert {compiled["version"] for compiled in first["compiles"]} <= recalled


def test_c55_better_togethers_candidates_score_again_what_was_recorded(third: dict[str, Any]) -> None:
    candidates = third["candidates"]
    assert set(candidates) == {"", "p", "p -> w"}
    moved = distance(answers(third["untrained"]), answers(third["newest"]))
    assert moved > OTHER, "the newest answers otherwise"
    for strategy, candidate in candidates.items():
        assert abs(candidate["again"] - candidate["score"]) < SAME_SCORE, (strategy, candidates)
