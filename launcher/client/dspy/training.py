"""The loop of one `GRPO.compile`: roll out, send the groups, train, validate, keep the best.

Neighbours: `grpo.py` checks the parameters and builds it; `rollout_collector.py` makes a step's groups;
`step_sender.py` has them trained; `validation_schedule.py` validates; `training_place.py` has its place,
`report.py` its report, `no_progress.py` and `program_failures.py` decide when it gives up. Advantages and
losses are computed in the runtime; here are only rollouts and their rewards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import dspy

from launcher.client.alarms import Alarms
from launcher.client.dspy import step_backfill
from launcher.client.dspy.examples import TrainingData, check_examples
from launcher.client.dspy.grpo_config import GRPOConfig
from launcher.client.dspy.held_out import HeldOutSet
from launcher.client.dspy.program_failures import ProgramFailures, nothing_to_score
from launcher.client.dspy.report import Journal, counts_text
from launcher.client.dspy.rollout_collector import RolloutCollector, StepBatch
from launcher.client.dspy.rollouts import Runner
from launcher.client.dspy.served_version import ServedVersion
from launcher.client.dspy.step_sender import StepSender
from launcher.client.dspy.training_place import Place
from launcher.client.dspy.validation import Evaluation, evaluate_examples
from launcher.client.dspy.validation_schedule import ValidationSchedule
from launcher.client.failures import ClientError, Refused, Rewound, StepFailed, TrainingFailed
from launcher.client.no_progress import NoProgressGuard, NothingToTrain
from launcher.client.schema import StepStatus
from launcher.client.session import Session
from launcher.client.train_kwargs import ResolvedTrainKwargs


@dataclass
class Training:
    """One run of the loop. `place` is where it stands, `journal` has its report and history.

    `resolved`: the train_kwargs on this run. `drops_truncated`: the trainer leaves out answers that were cut
    off.
    """

    config: GRPOConfig
    resolved: ResolvedTrainKwargs
    runner: Runner
    data: TrainingData
    session: Session
    place: Place
    journal: Journal
    drops_truncated: bool
    # Whether an earlier life of the program had done all steps.
    had_finished: bool = field(init=False)
    # The version served at the end, and its lasting name.
    final_version: tuple[int, str] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        config, journal, session = self.config, self.journal, self.session
        self.had_finished = self.place.is_over(config.num_train_steps)
        self.alarms = Alarms(config.thresholds)
        self._guard = NoProgressGuard(session.max_empty_steps)
        self._failures = ProgramFailures(
            journal, self.runner.adapter, session.status().model, has_run=self.place.step > 0
        )
        self.served = ServedVersion(session, journal)
        self.collector = RolloutCollector(
            config,
            self.runner,
            self.data,
            journal,
            self.served,
            self._failures,
            temperature=self.resolved.temperature,
            drops_truncated=self.drops_truncated,
        )
        self._sender = StepSender(session, self.collector, self.served, self.resolved, config.staleness > 0)
        self.held_out = HeldOutSet(config, self.data, self._evaluate, session, journal)
        self.validations = ValidationSchedule(
            config, self.held_out, self.served, self.collector.in_background, self._on_validation
        )

    # ------------------------------------------------------------- the loop

    def run(self) -> None:
        """All steps from the place on. Raises the session's errors, and TrainingFailed.

        If the machine is lost on the way, it goes back to the last durable place and rolls out again. A step
        that taught something in an earlier life of this training counts, as if there had been one life.
        """
        epoch = self.data.sampler.epoch(self.place.step - 1)
        step_backfill.backfill_last_step(self.place, epoch, self.session, self.journal)
        while True:
            try:
                with self.session.alarms.silenced():
                    self._run_steps()
                self.final_version = self.served.pin()
                break
            except Rewound as rewound:
                self._rewind(rewound)
        # A training that was shut down has taken fewer steps than were meant.
        steps = min(self.place.step, self.config.num_train_steps)
        self._failures.ended(steps, self.place.trained)

    def _run_steps(self) -> None:
        self.collector.begin(self.place.step, self.place.outstanding)
        self._sender.reset()
        try:
            self.collector.begin_allowed(self.place.step)
            self.validations.restart(self.place)
            self.validations.run_if_due(self.place)
            while self.place.step < self.config.num_train_steps:
                batch = self._roll_out(self.place.step)
                self.validations.collect(self.place)
                self._train(batch)
                if not self._can_send_next():
                    self._sender.wait_until_served()
                    self.collector.begin_allowed(self.place.step)
                self.validations.run_if_due(self.place)
                if self._is_stopped_by_alarm:
                    self._stop_on_alarm()
        finally:
            self.collector.end()
            self.validations.end()
        self._restore_best()

    def _roll_out(self, step: int) -> StepBatch:
        """A step's rollouts; another loop around these steps may end it here."""
        return self.collector.step(step)

    def _can_send_next(self) -> bool:
        """Whether the next step may be sent before the last one's version is served."""
        step = self.place.step
        is_last = step >= self.config.num_train_steps or self._is_stopped_by_alarm
        return self._sender.is_publishing and not is_last and not self.validations.is_due(step)

    def _restore_best(self) -> None:
        restored = self.held_out.restore_best(self.place)
        if restored is not None:
            self.served.note_published(restored)

    @property
    def _is_stopped_by_alarm(self) -> bool:
        return bool(self.alarms.raised) and self.config.on_alarm == "stop"

    def _stop_on_alarm(self) -> None:
        """After an alarm, with on_alarm="stop": serve the best policy and raise TrainingFailed."""
        self._sender.wait_until_served()
        self.validations.wait(self.place)
        self.collector.end()
        self.validations.run_now(self.place)
        self._restore_best()
        raise TrainingFailed(
            f"Training stopped after {self.place.step} of {self.config.num_train_steps} steps on an alarm",
            why="; ".join(f"{it.name}: {it.text}" for it in self.alarms.raised),
            hint='on_alarm="note" keeps training; alarms={"length": 3.0, …} changes a threshold',
        )

    def _rewind(self, rewound: Rewound) -> None:
        """To the run's step now: rollouts of the lost machine are worth nothing on this one."""
        self.journal.report.rewinds += 1
        self._guard.rewound(rewound)
        was = self.place.step
        # The status is newer than the error: another step may have been committed since.
        now = self.session.settle()
        self.place = self.place.rewound(now.client_state, now.last_metrics)
        self.held_out.last = None
        self.served.reset()
        self.journal.rewind(was, self.place.step)

    # ------------------------------------------------------------- a step

    def _train(self, batch: StepBatch) -> None:
        """Send the step, wait until the one before it is served, and then until this one is trained."""
        began = time.monotonic()
        self.place.outstanding = batch.outstanding
        sent = self._send(batch)
        try:
            self._sender.wait_until_served()
        except StepFailed:
            if sent is not None:
                self._finish_committed(batch, sent, began)
            raise
        if sent is not None:
            status = self._sender.wait_until_trained(batch, sent)
            self._finish(batch, status, time.monotonic() - began)

    def _send(self, batch: StepBatch) -> StepStatus | None:
        """Queue the step; None if none of its samples can be used, which is counted."""
        why = "no rollout called the policy"
        if untagged := self.journal.report.calls_outside_rollouts:
            why += f" ({untagged} calls came from threads the program started itself)"
        if batch.groups:
            try:
                return self._sender.send(batch, self.place.client_state(batch.step + 1))
            except Refused as refused:
                nothing = NothingToTrain.of(refused)
                why = nothing.why
                self.journal.report.add_dropped(nothing.counts)
        self._count_unsent(batch, why)
        return None

    def _count_unsent(self, batch: StepBatch, why: str) -> None:
        report = self.journal.report
        report.empty_steps += 1
        self.place.step = batch.step + 1
        outcomes = counts_text(batch.rollouts.outcomes)
        self.journal.note(f"step {batch.step + 1} trained nothing: {why} (rollouts: {outcomes})")
        ended = f"{why}; the last rollouts ended like this: {outcomes}"
        self._guard.empty(ended, nothing_to_score(report))

    def _finish_committed(self, batch: StepBatch, sent: StepStatus, began: float) -> None:
        """A step was sent before it was known that the training ends: it is committed, and has its line."""
        with suppress(ClientError):  # the program gets the reason why the step before it is not served
            status = sent if sent.state == "empty" else self.session.wait(sent.id, committed=True)
            self._finish(batch, status, time.monotonic() - began)

    def _finish(self, batch: StepBatch, status: StepStatus, train_seconds: float) -> None:
        """Move on to the next step, and have the record of this one read by all who judge the training."""
        record = batch.record(self.data.sampler.epoch(batch.step), status, train_seconds)
        self.place.step = record.step
        nothing = NothingToTrain.of_step(status)
        if nothing is None:
            self.place.trained |= status.counts.trained > 0
            self.place.restored = None  # this step was trained after it
            self._guard.trained()
        self.journal.step(record)
        if nothing is not None:
            self.journal.note(f"that step has no version: {nothing.why}")
        self._failures.note_unparsed(record.rollouts)
        self.journal.alarms(self.alarms.observe(record))
        self._failures.trained(record, batch.first_failure)
        if nothing is not None:
            self._guard.empty(nothing.why, nothing_to_score(self.journal.report), counts=nothing.counts)

    # ------------------------------------------------------------- a validation

    def _on_validation(self, found: Evaluation, step: int) -> None:
        self._failures.validated(found)
        score = found.score if self.held_out.last_is_comparable() else float("nan")
        self.journal.alarms(self.alarms.observe_validation(step, score))

    def _evaluate(self, examples: Sequence[dspy.Example], model: str | None) -> Evaluation:
        """`model` None: here and now; a version by its name: beside the rollouts, by their workers."""
        workers = self.collector.workers
        if workers is None and model is not None:
            raise RuntimeError("nothing is rolled out any more that this could go on beside")
        evaluation = evaluate_examples(
            self.runner,
            check_examples("examples", examples),
            self.config.failure_score,
            workers,
            model,
            fatal=not self._failures.has_run,
        )
        if model is None:
            self.served.check_runs(evaluation.finished, self.runner.predictors)
        return evaluation
