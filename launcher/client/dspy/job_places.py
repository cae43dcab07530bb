"""The place of a job of DSPy's own weight optimizers among this program's trainings, as GRPO's is.

By it a restarted program goes on within the job, and earlier and later trainings are told apart from it.
Neighbours: `training_job.py` and `reinforce_job.py` begin here, `compile_start.py` and `training_place.py`
have the rules. Knows nothing of the training itself.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.client.dspy.compile_start import begin_compile
from launcher.client.dspy.training_place import OptimizerWork, Place, digest_of
from launcher.client.session import Session

# The jobs decide themselves where they begin, because only they know their number of steps.
_UNKNOWN_STEPS = sys.maxsize


def begin_job(kind: str, train_kwargs: Mapping[str, Any], session: Session) -> Place:
    """The place of this program's next job: at its beginning, or where an earlier life of it was left."""
    program = Path(sys.argv[0]).name if sys.argv else ""
    what = f"{kind} {digest_of([dict(train_kwargs)])}"
    work = OptimizerWork(program, what, (), examples=0, seed=0, examples_per_step=0, rollouts=0)
    return begin_compile(work, session, _NoLog(), held_out=(), steps=_UNKNOWN_STEPS, resume=None)


class _NoLog:
    def note(self, text: str) -> None:
        """Nothing is logged."""
