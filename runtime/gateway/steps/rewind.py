"""The rewind of a run that lost its machine and went on from its last durable step.

    rewound.json    {"to_step": 7, "reused_after": 7, "time": unix seconds, "client_state": {…} | null}

The launcher writes the file into the new machine's state folder before the gateway starts. Neighbours:
queue.py asks before it counts a rollout as "no sample". Knows nothing of HTTP or of a machine's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from runtime.gateway.http.step_errors import RewoundError
from runtime.shared import json_files
from runtime.shared.schema import Group, Member

FILE = "rewound.json"


@dataclass(frozen=True)
class Rewind:
    """The run is back at `to_step`; the program's state there was `client_state`.

    `reused_after`: the least step that any loss of a machine went back to. Versions after it are counted
    again, so a number alone does not identify their weights. `time`: of the newest loss.
    """

    to_step: int
    client_state: dict[str, Any] | None
    reused_after: int
    time: float | None

    @classmethod
    def read(cls, state_dir: Path) -> Self | None:
        """The folder's rewind; None for a run that never lost a machine."""
        content = json_files.read_json(state_dir / FILE)
        if content is None:
            return None
        to_step = int(content["to_step"])
        reused_after = min(to_step, content.get("reused_after", to_step))
        return cls(to_step, content.get("client_state"), reused_after, content.get("time"))

    def check(
        self, groups: Iterable[Group], is_known: Callable[[Member], bool], *, steps_taken_since: bool
    ) -> None:
        """Raise RewoundError for rewards of rollouts that were lost with the machine, by tag or by sample.

        `steps_taken_since`: steps were taken in since. Then a step is refused only if all its rewards are of
        unknown rollouts: a program that has gone back may still reward a rollout that never got an answer,
        and must not be sent back for ever.
        """
        rewarded = {
            (member.rollout, member.sample, *(member.samples or ())): is_known(member)
            for group in groups
            for member in group.members
            if member.reward is not None and member.messages is None
        }
        lost = sum(not known for known in rewarded.values())
        if lost and (lost == len(rewarded) or not steps_taken_since):
            raise self.error(f"{lost} of its {len(rewarded)} rollouts are")

    def error(self, what: str) -> RewoundError:
        """The error for `what`, which was lost."""
        return RewoundError(
            f"{what} not known here: the machine was lost, and the run went back to step {self.to_step}; "
            "roll out again from that step's client_state",
            self.to_step,
            self.client_state,
            self.time,
        )
