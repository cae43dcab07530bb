"""GRPO with staleness, its process killed at random instants and started again: nothing twice or missing.

Neighbours: `tests/e2e/test_ahead_killed.py` does it to a real run, thirty times, by the same rules.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from launcher.records.endpoint import LocalEndpoint
from launcher.results import compile_records
from launcher.results.journals import read_lines
from runtime.shared.schema import StepRequest
from tests.programs.e2e import train_ahead as program
from tests.support.ahead_history import History, Rollout, Step
from tests.support.environment import REPOSITORY
from tests.support.lives import RUN
from tests.support.pretend_rollouts import plain
from tests.support.small_run import TOKEN, Asked, SmallRun
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

STEPS, KILLS = 12, 5
# So many answers and steps come before a kill.
EVENTS = (22, 62)


class StruckRun(SmallRun):
    """It kills its program when `left` answers were given, or steps taken in."""

    left = sys.maxsize
    # A step that it takes in, and whose sender hears nothing of it.
    last_words = 0
    before: frozenset[threading.Thread] = frozenset()
    victim: subprocess.Popen[bytes] | None = None

    def strike(self) -> None:
        self.left -= 1
        if self.left == 0 and self.victim is not None:
            self.victim.send_signal(signal.SIGKILL)

    def step(self, request: StepRequest) -> tuple[int, dict[str, Any]]:
        taken = super().step(request)
        if len(self.requests) == self.last_words:
            self.left = 1
        self.strike()
        return taken

    def quiet(self) -> bool:
        """Whether nothing that was sent to it is still to be dealt with.

        What an earlier test of this process has left waits for a next request, and for nothing of this one.
        """
        since = set(threading.enumerate()) - self.before
        return not any("process_request_thread" in it.name for it in since)


@pytest.fixture
def run() -> Iterator[StruckRun]:
    run = StruckRun(drop_flat=True)
    run.before = frozenset(threading.enumerate())

    def answer(asked: Asked) -> str:
        text = plain(asked)
        run.strike()
        return text

    run.answer = answer
    yield run
    run.close()


def live(run: StruckRun, folder: Path, events: int) -> int:
    """One life of the program, killed after so many events; its exit code."""
    door = LocalEndpoint(run.base_url.removesuffix("/v1"), TOKEN, RUN, folder, 20.0)
    run.left = events
    with (folder / "said.log").open("ab") as said:
        run.victim = subprocess.Popen(
            [sys.executable, program.__file__, str(STEPS)],
            cwd=REPOSITORY,
            env=door.environ(os.environ, len(run.requests)) | {"PYTHONPATH": str(REPOSITORY)},
            stdout=said,
            stderr=said,
        )
    try:
        code = run.victim.wait(timeout=120)
    finally:
        run.victim.kill()
    with socket.create_connection(("127.0.0.1", urlsplit(run.base_url).port or 0)) as last:
        last.sendall(b"GET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert last.recv(100)  # all that connected before was accepted
    wait_until(run.quiet, what="what it had asked to be dealt with")
    return code


def history(run: StruckRun, folder: Path) -> History:
    rollouts: dict[str, list[Asked]] = {}
    for asked in run.asked:
        if asked.tag("purpose") != "eval":
            rollouts.setdefault(asked.tag("rollout") or "", []).append(asked)
    steps = list[Step]()
    for number, request in sorted(run.requests.items()):
        varied = [it for it in request.groups if len({member.reward for member in it.members}) > 1]
        trained = [member.rollout for group in varied for member in group.members]
        steps.append(
            Step(
                number,
                request.client_state or {},
                tuple(dict.fromkeys(it.rollout for group in request.groups for it in group.members)),
                tuple(f"{name}:{place}" for name in trained for place in range(len(rollouts[name]))),
                run.steps[number]["counts"],
            )
        )
    return History(
        steps,
        {
            name: Rollout(
                name,
                asked[0].user.split("\n")[1],
                tuple((f"{name}:{place}", it.version or 0) for place, it in enumerate(asked)),
            )
            for name, asked in rollouts.items()
        },
        [json.loads(line) for line in (folder / program.BEGUN).read_text().splitlines()],
        sorted({(it.step, it.version or 0) for it in run.validations}),
        json.loads((folder / program.SUMMARY).read_text()),
    )


def test_c43_a_killed_process_goes_on_with_the_examples_of_one_that_was_not(
    run: StruckRun, tmp_path: Path
) -> None:
    chance = random.Random(14)
    for _ in range(KILLS):
        assert live(run, tmp_path, chance.randrange(*EVENTS)) == -signal.SIGKILL, said(tmp_path)
    assert live(run, tmp_path, sys.maxsize) == 0, said(tmp_path)
    assert [it["step"] for it in step_lines(tmp_path)] == [*range(1, STEPS + 1)]
    found = history(run, tmp_path)
    found.check(STEPS)
    assert len(found.begun) >= KILLS and found.figures()["of_these_rolled_out_again"] > 0


def test_a_step_that_is_committed_after_its_program_died_has_its_line_once(
    run: StruckRun, tmp_path: Path
) -> None:
    run.metrics = {"reward": 2.5, "reward_deviation": 0.5, "reward/write": 2.5, "loss": 0.25}
    for step in (3, 6):
        run.last_words = step
        assert live(run, tmp_path, sys.maxsize) == -signal.SIGKILL, said(tmp_path)
        with (tmp_path / "grpo.jsonl").open("a") as file:
            file.write('{"kind": "st\n')  # as a line that the kill has cut
    run.last_words = 0
    assert live(run, tmp_path, 1) == -signal.SIGKILL, said(tmp_path)  # its line is there by now
    assert live(run, tmp_path, sys.maxsize) == 0, said(tmp_path)
    written = step_lines(tmp_path)
    assert [it["step"] for it in written] == [*range(1, STEPS + 1)]
    late = [it for it in written if "late" in it]
    assert [(it["step"], it["version"], it["late"]) for it in late] == [(3, 3, True), (6, 6, True)]
    for line in late:
        assert (line["reward"], line["spread"], line["rewards"]) == (2.5, 0.5, {"write": 2.5})
        assert (line["parse_rate"], line["rollout_seconds"], line["outcomes"]) == (None, None, {})
        of_run = run.steps[line["step"]]
        assert line["metrics"] == of_run["metrics"] and line["counts"].items() >= of_run["counts"].items()
        assert len({it["compile"] for it in written}) == 1
    (compiled,) = compile_records.of_run(tmp_path)
    assert (compiled.done, compiled.steps) == (STEPS, STEPS) and compiled.seconds > 0


def step_lines(folder: Path) -> list[dict[str, Any]]:
    """What the program has written down of its steps."""
    return [it for it in read_lines(folder / "grpo.jsonl") if it["kind"] == "step"]


def said(folder: Path) -> str:
    return (folder / "said.log").read_text()[-3000:]
