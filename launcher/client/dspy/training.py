"""The loop of one `GRPO.compile`: roll out, send the groups, train, validate, keep the best.

Neighbours: `grpo.py` checks the parameters and builds it; `rolling.py` makes a step's groups; `session.py`
trains them; `validation_schedule.py` validates; `training_place.py` has its place, `report.py` its report,
`no_progress.py` and `program_failures.py` decide when it gives up. Advantages and losses are computed in the
runtime; here are only rollouts and their rewards.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import dspy

from launcher.client.alarms import Alarm, Alarms, Thresholds
from launcher.client.dspy import step_backfill
from launcher.client.dspy.examples import check_examples
from launcher.client.dspy.held_out import CheckpointMode, HeldOutSet
from launcher.client.dspy.lm import PolicyLM
from launcher.client.dspy.metrics_collection import collect_metrics
from launcher.client.dspy.predictors import Predictors
from launcher.client.dspy.program_failures import ProgramFailures, nothing_to_score, unparsed
from launcher.client.dspy.report import Journal, Report, StepLine, counts_text
from launcher.client.dspy.rolling import Rolled, Rolling, Sampling
from launcher.client.dspy.sampler import EpochSampler
from launcher.client.dspy.scoring import Metric
from launcher.client.dspy.served_version import ServedVersion
from launcher.client.dspy.training_place import Place
from launcher.client.dspy.validation import Evaluation, evaluate_examples
from launcher.client.dspy.validation_schedule import ValidationSchedule
from launcher.client.dspy.workers import BackgroundCall
from launcher.client.failures import ClientError, Refused, Rewound, StepFailed, TrainingFailed
from launcher.client.no_progress import NoProgressGuard, NothingToTrain
from launcher.client.schema import StepStatus
from launcher.client.session import Session
from launcher.client.train_kwargs import ResolvedTrainKwargs

OnAlarm = Literal["note", "stop"]


@dataclass(frozen=True)
class CompilePlan:
    """The settings of one `compile`."""

    steps: int
    sampling: Sampling
    steps_for_validation: int
    keep: CheckpointMode
    staleness: int
    report_train_scores: bool
    thresholds: Thresholds = field(default_factory=Thresholds)
    on_alarm: OnAlarm = "note"


@dataclass
class Training:
    """One run of the loop. `history` has a dict for each step and each validation, as in `grpo.jsonl`."""

    program: dspy.Module
    policies: Sequence[PolicyLM]
    trainset: Sequence[dspy.Example]
    valset: Sequence[dspy.Example]
    metric: Metric
    adapter: dspy.Adapter
    session: Session
    sampler: EpochSampler
    plan: CompilePlan
    place: Place
    journal: Journal
    # The settings of each step that differ from the run's.
    resolved: ResolvedTrainKwargs = field(default_factory=ResolvedTrainKwargs)
    # For predictors without an LM of their own.
    lm: PolicyLM | None = None
    report: Report = field(default_factory=Report)
    history: list[dict[str, Any]] = field(default_factory=list)
    _predictors: Predictors = field(init=False)
    rolling: Rolling = field(init=False)
    _guard: NoProgressGuard = field(init=False)
    _failures: ProgramFailures = field(init=False)
    # The step that is committed, and waits for its version to be served.
    _serving: BackgroundCall[StepStatus] | None = None
    alarms: Alarms = field(init=False)
    held_out: HeldOutSet = field(init=False)
    validations: ValidationSchedule = field(init=False)
    served: ServedVersion = field(init=False)
    # Whether an earlier life of the program had done all steps.
    had_finished: bool = field(init=False)
    # The version served at the end, and its lasting name.
    final_version: tuple[int, str] | None = None

    def __post_init__(self) -> None:
        self.had_finished = self.place.is_over(self.plan.steps)
        self._predictors = Predictors(self.program)
        self.alarms = Alarms(self.plan.thresholds)
        self._guard = NoProgressGuard(self.session.max_empty_steps)
        self._failures = ProgramFailures(self.report, self.adapter, has_run=self.place.step > 0)
        self.served = ServedVersion(self.session, self.journal)
        self.rolling = Rolling(
            self.program,
            self.policies,
            self.trainset,
            self.metric,
            self.adapter,
            self.sampler,
            self.plan.sampling,
            self.plan.steps,
            self.plan.staleness,
            self.lm,
            self._predictors,
            self.report,
            self.journal,
            self.served,
            self._failures,
        )
        train = self.trainset if self.plan.report_train_scores else ()
        keep, session = self.plan.keep, self.session
        self.held_out = HeldOutSet(self.valset, train, self._evaluate, session, self.journal, keep)
        self.validations = ValidationSchedule(
            self.plan.steps,
            self.plan.steps_for_validation,
            self.plan.staleness,
            self.held_out,
            self.served,
            self.journal,
            self.rolling.in_background,
            self._on_validation,
        )

    def run(self) -> None:
        """All steps from the place on. Raises the session's errors, and TrainingFailed.

        If the machine is lost on the way, it goes back to the last durable place and rolls out again. A step
        that taught something in an earlier life of this training counts, as if there had been one life.
        """
        step_backfill.backfill_last_step(
            self.place, self.sampler.epoch(self.place.step - 1), self.session, self.journal
        )
        while True:
            try:
                self._run_steps()
                self.final_version = self.served.pin()
                break
            except Rewound as rewound:
                self._rewind(rewound)
        self._failures.ended(self.plan.steps, self.place.trained)

    def _run_steps(self) -> None:
        self.rolling.begin(self.place.step, self.place.outstanding)
        self._serving = None  # of a machine that was lost
        try:
            self.rolling.begin_allowed(self.place.step)
            self.validations.restart(self.place)
            self.validations.run_if_due(self.place)
            while self.place.step < self.plan.steps:
                rolled = self._roll_out(self.place.step)
                self.validations.collect(self.place)
                self._train(rolled)
                if not self._can_send_next():
                    self._wait_until_served()
                    self.rolling.begin_allowed(self.place.step)
                self.validations.run_if_due(self.place)
                if self.alarms.raised and self.plan.on_alarm == "stop":
                    self._stop_on_alarm()
        finally:
            self.rolling.end()
            self.validations.end()
        self._restore_best()

    def _roll_out(self, step: int) -> Rolled:
        """A step's rollouts; another loop around these steps may end it here."""
        return self.rolling.step(step)

    def _restore_best(self) -> None:
        restored = self.held_out.restore_best(self.place)
        if restored is not None:
            self.served.note_published(restored)

    def _stop_on_alarm(self) -> None:
        """After an alarm, with on_alarm="stop": serve the best policy and raise TrainingFailed."""
        self._wait_until_served()
        self.validations.wait(self.place)
        self.rolling.end()
        self.validations.run_now(self.place)
        self._restore_best()
        raise TrainingFailed(
            f"Training stopped after {self.place.step} of {self.plan.steps} steps on an alarm",
            why="; ".join(f"{it.name}: {it.text}" for it in self.alarms.raised),
            hint='on_alarm="note" keeps training; alarms={"length": 3.0, …} changes a threshold',
        )

    def _rewind(self, rewound: Rewound) -> None:
        """To the run's step now: rollouts of the lost machine are worth nothing on this one."""
        self.report.rewinds += 1
        self._guard.rewound(rewound)
        was = self.place.step
        # The status is newer than the error: another step may have been committed since.
        now = self.session.settle()
        self.place = self.place.rewound(now.client_state, now.last_metrics)
        self.held_out.last = None
        self.served.reset()
        self.history.append({"kind": "rewind", "from": was, "to": self.place.step})
        self.journal.note(
            f"the machine was lost: back from step {was} to step {self.place.step}, rolling out again"
        )

    # ------------------------------------------------------------- a step

    def _report_unparsed(self, parse_rate: float, cut_off_rate: float, outcomes: Mapping[str, int]) -> None:
        if not parse_rate and any(count for name, count in outcomes.items() if name != "crashed"):
            text = f"no run had answers that could be parsed; {unparsed(cut_off_rate, self.adapter)}"
            self.journal.note_once("unparsed", text)

    def _train(self, rolled: Rolled) -> None:
        """Train the step, while later ones are rolled out.

        With staleness it is enough that it is committed: the next may be sent while its version is verified.
        Rollouts on that version begin once it is served.
        """
        began = time.monotonic()
        self.place.outstanding = rolled.outstanding
        sent = self._send(rolled)
        try:
            self._wait_until_served()
        except StepFailed:
            if sent is not None:
                self._finish_committed(rolled, sent, began)
            raise
        if sent is None:
            return
        ahead = self.plan.staleness > 0
        status = self._wait_until_trained(sent, ahead)
        if status.state == "empty":
            pass  # the version before it is served on
        elif ahead:
            self.served.note_committed(status)
            self._serving = self.rolling.begin_allowed_after(
                rolled.step + 1, partial(self.session.wait, sent.id)
            )
        else:
            self.served.note_published(status)
        self._finish(rolled, status, time.monotonic() - began)

    def _wait_until_trained(self, sent: StepStatus, ahead: bool) -> StepStatus:
        if sent.state == "empty":
            return sent
        return self.rolling.in_background(partial(self.session.wait, sent.id, committed=ahead)).result()

    def _finish_committed(self, rolled: Rolled, sent: StepStatus, began: float) -> None:
        """A step was sent before it was known that the training ends: it is committed, and has its line."""
        with suppress(ClientError):  # the program gets the reason why the step before it is not served
            status = sent if sent.state == "empty" else self.session.wait(sent.id, committed=True)
            self._finish(rolled, status, time.monotonic() - began)

    def _can_send_next(self) -> bool:
        """Whether the next step may be sent before the last one's version is served."""
        step = self.place.step
        is_last = step >= self.plan.steps or bool(self.alarms.raised and self.plan.on_alarm == "stop")
        return self._serving is not None and not is_last and not self.validations.is_due(step)

    def _wait_until_served(self) -> None:
        """Wait until the last step's version is served. Raises the errors of its publication."""
        serving, self._serving = self._serving, None
        if serving is not None:
            self.served.note_published(serving.result())

    def _send(self, rolled: Rolled) -> StepStatus | None:
        """Queue the step, unless it is empty; None when none of its samples can be used.

        Every group rolled out is sent.
        """
        why = "no rollout called the policy"
        if untagged := self.report.calls_outside_rollouts:
            why += f" ({untagged} calls came from threads the program started itself)"
        if rolled.grouped.groups:
            state = self.place.client_state(rolled.step + 1)
            try:
                return self.session.step(
                    rolled.grouped.groups,
                    client_state=state,
                    wait=False,
                    settings=self.resolved.settings_at(rolled.step),
                )
            except Refused as refused:
                nothing = NothingToTrain.of(refused)
                why = nothing.why
                self.report.add_dropped(nothing.counts)
        self._count_empty_step(rolled, why)
        return None

    def _count_empty_step(self, rolled: Rolled, why: str) -> None:
        self.report.empty_steps += 1
        self.place.step = rolled.step + 1
        outcomes = counts_text(rolled.grouped.outcomes)
        self.journal.note(f"step {rolled.step + 1} trained nothing: {why} (rollouts: {outcomes})")
        ended = f"{why}; the last rollouts ended like this: {outcomes}"
        self._guard.empty(ended, nothing_to_score(self.report))

    def _finish(self, rolled: Rolled, status: StepStatus, train_seconds: float) -> None:
        self.place.step = rolled.step + 1
        nothing = NothingToTrain.of_step(status)
        if nothing is None:
            self.place.trained |= status.counts.trained > 0
            self.place.restored = None  # this step was trained after it
            self._guard.trained()
        self.report.add_step(status.counts, empty=nothing is not None)
        seconds = (rolled.seconds, train_seconds)
        rates = (rolled.parse_rate, rolled.cut_off_rate)
        line = StepLine.of(
            rolled.step + 1, self.sampler.epoch(rolled.step), rolled.grouped, rates, status, seconds,
            rolled.resampled, rolled.staleness, rolled.stale,
        )  # fmt: skip
        self.journal.step(line)
        if nothing is not None:
            self.journal.note(f"that step has no version: {nothing.why}")
        self._report_unparsed(*rates, rolled.grouped.outcomes)
        self.history.append({"kind": "step", **asdict(line)})
        seen = collect_metrics(rolled.step + 1, rolled.finished, rolled.grouped, rolled.cut_off_rate, status)
        self._raise_alarms(self.alarms.observe(seen))
        self._failures.trained(rolled.finished, *rates, status.counts.trained)
        if nothing is not None:
            self._guard.empty(nothing.why, nothing_to_score(self.report), counts=nothing.counts)

    def _raise_alarms(self, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            self.journal.alarm(alarm)
            self.history.append({"kind": "alarm", **asdict(alarm)})
            self.report.alarms.append(alarm.name)

    # ------------------------------------------------------------- validation

    def _on_validation(self, entry: dict[str, Any], step: int) -> None:
        self.history.append(entry)
        self._failures.validated(entry["outcomes"])
        self._report_unparsed(entry["parse_rate"], entry["cut_off_rate"], entry["outcomes"])
        score = entry["score"] if self.held_out.last_is_comparable() else float("nan")
        self._raise_alarms(self.alarms.observe_validation(step, score))

    def _evaluate(self, examples: Sequence[dspy.Example], model: str | None) -> Evaluation:
        """`model` None: here and now; a version by its name: beside the rollouts, by their workers."""
        workers = self.rolling.workers
        if workers is None and model is not None:
            raise RuntimeError("nothing is rolled out any more that this could go on beside")
        evaluation = evaluate_examples(
            self.rolling.runner,
            check_examples("examples", examples),
            self._predictors,
            self.plan.sampling.rules.failure_score,
            workers,
            model,
            fatal=not self._failures.has_run,
        )
        if model is None:
            self.served.check_runs(evaluation.finished, self._predictors)
        return evaluation
