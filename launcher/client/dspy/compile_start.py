"""Decides where a compile begins: at step 0 on the present policy, or where an earlier life of its program
stopped.

Neighbours: `grpo.py` and the jobs of `provider.py` ask, `training_place.py` recognises another program's
steps, `launch --resume` starts a program again. Another program's steps never count as this one's: a second
program on the same endpoint trains all of its own.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import dspy

from launcher.client.dspy.training_place import PROGRAM_VARIABLE, OptimizerWork, Place, digest_of
from launcher.client.failures import TrainingFailed
from launcher.client.schema import RuntimeStatus
from launcher.client.session import Session

_WITHOUT_RESUME = "without resume=True it starts at step 0, with the policy as it is now"


@dataclass
class _CompileRecord:
    """The digest of an optimizer's work, and the name of the version that came out of it, once it has."""

    digest: str
    name: str | None = None


# The compiles of this process on each run, whose order tells the places apart after a restart.
_compiles: defaultdict[str, list[_CompileRecord]] = defaultdict(list)


class NoteLog(Protocol):
    """Logs a line for people: an optimizer's journal, for one."""

    def note(self, text: str) -> Any: ...


def begin_compile(
    work: OptimizerWork,
    session: Session,
    journal: NoteLog,
    *,
    held_out: Sequence[dspy.Example],
    steps: int,
    resume: bool | None,
) -> Place:
    """The place to begin at, which is logged. Raises TrainingFailed if nothing can be resumed.

    `steps`: the number of steps of the whole work. `resume`: see `GRPO`.
    """
    compiled = _compiles[session.endpoint.root]
    fresh = Place(
        work,
        compile=len(compiled),
        earlier=tuple(it.digest for it in compiled),
        names=tuple(it.name for it in compiled),
        life=os.environ.get(PROGRAM_VARIABLE),
        held_out=digest_of([dict(it.items()) for it in held_out]),
    )
    compiled.append(_CompileRecord(work.digest))
    status = session.settle()
    place = _resumed_place(fresh, status, steps, resume)
    if place is not None:
        journal.note(_start_note(place, steps))
    elif status.step:
        why = fresh.why_not_resumed(status.client_state)
        words = f"starting at step 0 with the policy as it is now (v{status.version})"
        journal.note(f"{words}: {why}" if why else words)
    return place or fresh


def record_version(place: Place, name: str, session: Session) -> None:
    """The version that came out of the training at this place: after a restart its program asks it again."""
    compiled = _compiles[session.endpoint.root]
    if place.compile < len(compiled):
        compiled[place.compile].name = name


def _start_note(place: Place, steps: int) -> str:
    finished = "this optimizer finished before the program was restarted: nothing is left to train"
    if place.superseded:
        return finished
    if place.step >= steps:
        return f"{finished} ({place.step} steps are done; raise num_train_steps to train more)"
    return f"resuming after {place.step} of {steps} steps"


def _resumed_place(fresh: Place, status: RuntimeStatus, steps: int, resume: bool | None) -> Place | None:
    state, metrics = status.client_state, status.last_metrics
    if resume is None:
        return fresh.restarted(state, metrics)
    if not resume:
        return None
    try:
        place = fresh.resumed(state, metrics)
    except ValueError as error:
        raise TrainingFailed("There is nothing to resume", str(error), _WITHOUT_RESUME) from error
    if place.step >= steps and not place.superseded:
        raise TrainingFailed(
            "There is nothing left to train",
            f"the run has done {place.step} steps of this work, {steps} are asked for",
            f"num_train_steps above {place.step} trains more; {_WITHOUT_RESUME}",
        )
    return place
