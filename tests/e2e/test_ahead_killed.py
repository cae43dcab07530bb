"""A real run that trains ahead of itself, killed at random instants and resumed: nothing twice or missing.

Struck are `launch`, the user's program and the trainer, always with -9; the first two end a life, which
`launch --resume` begins again, the trainer is restarted within one. Its short form is
`tests/unit/test_client_killed.py`, by the same rules: `tests/support/ahead_history.py`.

    SLIPWAY_LONG_DIR=seen uv run pytest -m long tests/e2e/test_ahead_killed.py --one-by-one

A line an instant in `instants.jsonl` of that folder, where it goes on when it is called again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from launcher.base.processes import ProcessId
from tests.e2e.conftest import make_home
from tests.programs.e2e import train_ahead as program
from tests.support.ahead_history import History, Rollout, Step
from tests.support.launched import Launched, processes_of
from tests.support.ports import free_port
from tests.support.waiting import SOONEST_SECONDS, wait_until

pytestmark = pytest.mark.long

LONG_VARIABLE = "SLIPWAY_LONG_DIR"
STEPS, INSTANTS, SEED = 36, 30, 14
# An instant falls into so much of a step at most: on a quiet computer a whole one takes less.
STEP_SECONDS = 2.5
JOB_FAILED = 6
_READY_SECONDS = 900
_STEP_PATIENCE = 300

Victim = Literal["launch", "program", "trainer"]
VICTIMS: tuple[Victim, ...] = ("launch", "program", "trainer")


@dataclass(frozen=True)
class Instant:
    """`share` of a step after so many were committed, or after its life began to train if that is later."""

    steps: int
    share: float
    victim: Victim


def instants() -> list[Instant]:
    """From the first step that is committed, before which there is nothing to resume, to the last."""
    chance = random.Random(SEED)
    places = sorted(chance.uniform(1, STEPS - 1) for _ in range(INSTANTS))
    victims: list[Victim] = [VICTIMS[number % len(VICTIMS)] for number in range(INSTANTS)]
    chance.shuffle(victims)
    return [Instant(int(place), place % 1, victim) for place, victim in zip(places, victims, strict=True)]


class Lives:
    """One run named dev, and what is on disk of it."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.log = folder / "instants.jsonl"
        home = folder / "home"
        self.home = home if home.exists() else make_home(home)
        self.steps = steps
        self.life: Launched | None = None

    @property
    def done(self) -> list[dict[str, Any]]:
        return lines(self.log)

    @property
    def folder(self) -> Path:
        (folder,) = (self.home / "runs").glob("slip-*")
        return folder

    @property
    def machine(self) -> Path:
        return self.folder / "machine"

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def committed(self) -> int:
        return max((int(it.name[5:]) for it in (self.machine / "checkpoints").glob("step-*")), default=0)

    def step_seconds(self) -> float:
        """From one commit to the next, of the quickest so far: between others lies the end of a life."""
        times = sorted(it.stat().st_mtime for it in (self.machine / "checkpoints").glob("step-*"))
        return min([STEP_SECONDS, *(later - sooner for sooner, later in pairwise(times))])

    def begin(self) -> Launched:
        """The next life, once it trains."""
        begun = self.begun()
        self.end_what_is_left()
        program_line = ["--name", "dev", "--", sys.executable, program.__file__, str(self.steps)]
        words = ["--resume", "dev"] if begun else program_line
        self.life = Launched(self.home, ["--port", str(free_port()), *words])
        self.wait(lambda: len(self.begun()) > len(begun), _READY_SECONDS, "the program to begin")
        return self.life

    def end_what_is_left(self) -> None:
        """Of a session of tests that was killed itself."""
        if not any((self.home / "runs").glob("slip-*")):
            return
        launch = json.loads((self.folder / "record.json").read_text())["launch"]
        if launch and ProcessId(**launch).alive():
            os.kill(launch["pid"], signal.SIGKILL)
        wait_until(lambda: not processes_of(self.folder.name), 120, "nothing of the last life to be left")

    def begun(self) -> list[dict[str, Any]]:
        """What each life has said as it began."""
        if not any((self.home / "runs").glob("slip-*")):
            return []
        return lines(self.results / program.BEGUN)

    def wait(self, condition: Any, seconds: float, what: str) -> None:
        """Ends early where launch does."""
        life = self.life
        assert life is not None
        wait_until(
            lambda: condition() or life.process.poll() is not None,
            seconds,
            lambda: f"{what}\n{life.stderr[-3000:]}",
            rarest_seconds=SOONEST_SECONDS,
        )
        assert life.process.poll() is None, life.stdout + life.stderr

    def strike(self, instant: Instant) -> None:
        """Kill at this instant; the life is over afterwards, but for one that lost its trainer."""
        life = self.life or self.begin()
        self.wait(lambda: self.committed >= instant.steps, _STEP_PATIENCE, f"{instant.steps} steps")
        seconds = instant.share * self.step_seconds()
        time.sleep(seconds)
        if instant.victim == "trainer":
            self.wait(lambda: self.trainer() is not None, _STEP_PATIENCE, "a trainer")
        line = {"instant": len(self.done) + 1, "victim": instant.victim, "time": round(time.time(), 3)}
        victim = {"launch": lambda: life.process.pid, "program": self.program, "trainer": self.trainer}
        line |= {"after_seconds": round(seconds, 3), "committed": self.committed}
        os.kill(victim[instant.victim]() or 0, signal.SIGKILL)
        line |= {"during": self.phase(), "life": len(self.begun())}
        if instant.victim != "trainer":
            code = life.wait(300)
            assert code == (-signal.SIGKILL if instant.victim == "launch" else JOB_FAILED), life.stderr
            wait_until(lambda: not processes_of(life.run_id), 120, "nothing of that life to be left")
            self.life = None
        with self.log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def program(self) -> int:
        return self.begun()[-1]["pid"]

    def trainer(self) -> int | None:
        """The one that lives; one that was killed a moment ago is not."""
        found = [it for it in processes_of(self.folder.name) if "runtime.recipes.tune" in _words(it)]
        return found[0].pid if found else None

    def phase(self) -> str:
        """What was under way."""
        given = sorted((self.machine / "steps").glob("[0-9]*"))
        newest = int(given[-1].name) if given else 0
        if newest > self.committed:
            return "training"
        queue = self.machine / "steps" / "queue"
        if newest and not (queue / f"{newest:06d}.outcome.json").exists():
            return "publishing"
        queued = [it for it in queue.glob("[0-9]*.json") if it.name.count(".") == 1 and int(it.stem) > newest]
        return "handing over" if queued else "rolling out"

    def end(self) -> None:
        if self.life is not None:
            self.life.kill_tree()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def history(lives: Lives) -> History:
    """By what the run has kept: batches, samples, metrics, validations, and what its program said."""
    samples = lives.machine / "samples"
    exchanges = [line for path in sorted(samples.glob("[0-9]*.jsonl")) for line in lines(path)]
    claimed = {it["claim"] for it in exchanges if "claim" in it}
    lost = {it["loss"] for it in exchanges if "loss" in it}
    recorded: dict[str, list[tuple[str, int]]] = {}
    for it in exchanges:
        if "request" in it and it["tags"]["purpose"] == "train":
            of_rollout = recorded.setdefault(it["tags"]["rollout"], [])
            received = (it["delivered"] or it["request"] in claimed) and it["request"] not in lost
            of_rollout += [(sample["id"], it["version"]) for sample in it["samples"] if received]
    metrics = {it["step"]: it for it in lines(lives.results / "metrics.jsonl")}
    assert [it["step"] for it in lines(lives.results / "metrics.jsonl")] == list(metrics), "each line once"
    english = dict[str, str]()
    steps = list[Step]()
    for number, metric in metrics.items():
        batch = json.loads((lives.machine / "steps" / f"{number:06d}" / "batch.json").read_text())
        shown = lines(lives.results / "rollouts" / f"step-{number:06d}.jsonl")
        english |= {
            it["rollout"]: it["prompt"].rpartition("[[ ## english ## ]]\n")[2].split("\n")[0] for it in shown
        }
        given = json.loads((lives.machine / "steps" / "queue" / f"{number:06d}.json").read_text())
        rollouts = dict.fromkeys(
            member["rollout"] for group in given["groups"] for member in group["members"]
        )
        flat = {
            it["id"] for it in given["groups"] if len({member["reward"] for member in it["members"]}) == 1
        }
        varied = {
            member["rollout"] for it in given["groups"] if it["id"] not in flat for member in it["members"]
        }
        trained = [turn["id"] for it in batch["samples"] if it["rollout"] in varied for turn in it["turns"]]
        steps.append(Step(number, batch["client_state"], tuple(rollouts), tuple(trained), metric["counts"]))
    validated = {(it["step"], it["version"]) for it in lines(lives.results / "validations.jsonl")}
    return History(
        steps,
        {name: Rollout(name, english.get(name), tuple(it)) for name, it in recorded.items()},
        lives.begun(),
        sorted(validated),
        json.loads((lives.results / program.SUMMARY).read_text()),
    )


def finished(lives: Lives) -> History:
    """The life under way, or a last one, to its end."""
    if not (lives.begun() and (lives.results / program.SUMMARY).exists()):
        life = lives.life or lives.begin()
        assert life.wait(1200) == 0, life.stdout + life.stderr
        lives.life = None
    found = history(lives)
    found.check(lives.steps)
    return found


def test_c43_g21_live_killed_at_thirty_random_instants_a_run_ahead_of_itself_trains_each_example_once(
    tmp_path: Path,
) -> None:
    folder = Path(os.environ.get(LONG_VARIABLE) or tmp_path).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    killed = Lives(folder / "killed", STEPS)
    whole = Lives(folder / "whole", STEPS)
    try:
        for instant in instants()[len(killed.done) :]:
            killed.strike(instant)
        found = finished(killed)
        assert len(killed.done) == INSTANTS
        found.check_like(finished(whole))
        seen = Counter((it["victim"], it["during"]) for it in killed.done)
        figures = found.figures() | {" ".join(it): count for it, count in sorted(seen.items())}
        (folder / "figures.json").write_text(json.dumps(figures, indent=1))
        assert found.figures()["of_these_rolled_out_again"] > 0
    finally:
        killed.end()
        whole.end()
