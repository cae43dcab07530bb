"""What tests of a training that rolls out ahead share: what was trained, how old it was, who waits."""

from __future__ import annotations

import json
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.client.dspy.rollout_pool import RolloutPool
from launcher.client.dspy.step_keys import Key
from tests.support.pretend_rollouts import key_of
from tests.support.small_run import Asked, SmallRun

# Of `pretend_rollouts.optimizer`.
E, K = 3, 4
# For what a test waits for that fails: less than the client's own.
PATIENCE = 30


class Held(threading.Event):
    """`hold` waits for it; `in_vain`: how often that came to nothing, so that what should not wait has."""

    in_vain = 0

    def hold(self) -> None:
        self.in_vain += not self.wait(PATIENCE)


class Pools(list[RolloutPool]):
    """Every pool there was, the one that rolls out last."""

    def settle(self, is_late: Callable[[Key], bool]) -> None:
        """Wait until all that is begun is done, but for what is late: a step trains for so long."""
        pool = self[-1]
        workers = pool.workers

        def is_settled() -> bool:
            over = workers._stopped or workers._error is not None
            return over or all(it.ended or is_late(it.key) for it in pool._scheduler.open.values())

        with workers.changed:
            assert workers.changed.wait_for(is_settled, PATIENCE)


def trained(run: SmallRun) -> list[list[tuple[int, int]]]:
    """The keys of each step's groups, in the order in which they were sent."""
    steps = (request for _, request in sorted(run.requests.items()))
    return [
        list(dict.fromkeys(key_of(it.rollout) for group in step.groups for it in group.members))
        for step in steps
    ]


def lags(run: SmallRun) -> list[Counter[int]]:
    """Of each step's answers, how many were sampled so many steps before it, by what was answered."""
    versions: dict[str, list[int]] = {}
    for asked in run.asked:
        versions.setdefault(asked.tag("rollout") or "", []).append(asked.version or 0)
    rollouts = {
        number: [it.rollout for group in request.groups for it in group.members]
        for number, request in sorted(run.requests.items())
    }
    return [
        Counter(number - 1 - version for it in dict.fromkeys(named) for version in versions[it])
        for number, named in rollouts.items()
    ]


def ctrl_c() -> None:
    """As the keyboard has it: the program's first thread gets it, whatever it waits for."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def of_training(asked: Asked) -> bool:
    return asked.tag("purpose") != "eval"


def journal(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Lines of one kind that the program wrote down."""
    lines = map(json.loads, (folder / "grpo.jsonl").read_text().splitlines())
    return [it for it in lines if it["kind"] == kind]
