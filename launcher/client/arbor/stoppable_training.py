"""The loop of `GRPO.compile` as an Arbor job: it can be stopped from outside before its next step.

Neighbours: `jobs.py` takes the request, `optimizer.py` begins it; `client/dspy/training.py` is the loop
itself. Knows nothing of Arbor's spellings.
"""

from __future__ import annotations

from launcher.client.arbor.jobs import Job
from launcher.client.dspy.rollout_collector import StepBatch
from launcher.client.dspy.training import Training


class _JobCancelled(Exception):  # noqa: N818 - names the event
    """The job was shut down."""


class StoppableTraining(Training):
    """Ends after the step in progress once its `job` is cancelled: validated, the best served, no failure."""

    job: Job | None = None

    def _run_steps(self) -> None:
        try:
            super()._run_steps()
        except _JobCancelled:
            steps = self.config.num_train_steps
            self.journal.note(f"shut down after {self.place.step} of {steps} steps")
            self.validations.run_now(self.place)
            self._restore_best()

    def _roll_out(self, step: int) -> StepBatch:
        if self.job is not None and self.job.is_cancelled.is_set():
            self._sender.wait_until_served()
            self.validations.wait(self.place)  # it may have found the best
            raise _JobCancelled
        return super()._roll_out(step)
