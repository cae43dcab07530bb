"""The loop of one `GRPO.compile`: roll out, send the groups, train, validate, keep the best.

Neighbours: `grpo.py` checks what it was asked and builds it; `rollouts.py` and `grouping.py` make a step's
groups; `session.py` trains them; `place.py` is where it stands, `report.py` what it says.
Advantages and losses are the runtime's; here are only rollouts and their rewards.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import dspy

from launcher.client.alarms import Alarm, Alarms, Thresholds
from launcher.client.errors import Refused, Rewound, TrainingFailed
from launcher.client.grouping import Grouped, Rules, build_groups
from launcher.client.lm import PolicyLM
from launcher.client.observing import observe
from launcher.client.place import Place, Validated
from launcher.client.report import Journal, Report, StepLine, counted, listed
from launcher.client.rollouts import Finished, Limits, Run, run_all
from launcher.client.sampler import EpochSampler
from launcher.client.scoring import Metric
from launcher.client.session import Session
from launcher.client.tagging import Predictors, Rollout
from launcher.client.validation import Evaluation, check_answered, evaluate
from runtime.schema import StepCounts

# Steps that teach nothing, one after the other, before the training gives up.
_VAIN_STEPS_IN_A_ROW = 3
# Losses of the machine without a finished step between them, likewise.
_REWINDS_IN_A_ROW = 3

Keep = Literal["single-best", "improvements", "none"]
OnAlarm = Literal["note", "stop"]


@dataclass(frozen=True)
class Plan:
    """What one `compile` was asked to do."""

    steps: int
    rollouts: int
    temperature: float
    seed: int
    limits: Limits
    rules: Rules
    steps_for_validation: int
    keep: Keep
    staleness: int
    report_train_scores: bool
    thresholds: Thresholds = field(default_factory=Thresholds)
    on_alarm: OnAlarm = "note"


@dataclass(frozen=True)
class _Rolled:
    """One step's rollouts, before they are trained."""

    step: int
    finished: Sequence[Finished]
    grouped: Grouped
    parse_rate: float
    cut_off_rate: float
    seconds: float


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
    plan: Plan
    place: Place
    journal: Journal
    # For what the program asks without an LM of its own.
    lm: PolicyLM | None = None
    report: Report = field(default_factory=Report)
    history: list[dict[str, Any]] = field(default_factory=list)
    _predictors: Predictors = field(init=False)
    _token: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    _empty_in_a_row: int = 0
    _crashed_in_a_row: int = 0
    _rewinds_in_a_row: int = 0
    _said: set[str] = field(default_factory=set)
    alarms: Alarms = field(init=False)
    # The version served after the last step that was waited for.
    version: int | None = None

    def __post_init__(self) -> None:
        self._predictors = Predictors(self.program)
        self.alarms = Alarms(self.plan.thresholds)

    def run(self) -> None:
        """All steps from the place on. Raises what the session raises, and TrainingFailed.

        Where the machine was lost on the way, it goes back to the last durable place and rolls out again.
        """
        resumed = self.place.step > 0
        while True:
            try:
                self._run_on()
                break
            except Rewound as rewound:
                self._go_back(rewound)
        if not resumed:
            self._check_taught()

    def _run_on(self) -> None:
        self._validate_if_due(self.place.step)
        under_way: tuple[_Rolled, int, float] | None = None
        for step in range(self.place.step, self.plan.steps):
            rolled = self._roll_out(step)
            if under_way is not None:
                self._finish(*under_way)
            under_way = self._send(rolled)
            if under_way is not None and (self.plan.staleness == 0 or self._due(step + 1)):
                self._finish(*under_way)
                under_way = None
            if under_way is None:
                self._validate_if_due(step + 1)
            if self.alarms.raised and self.plan.on_alarm == "stop":
                self._stop(under_way)
        self._restore_best()

    def _stop(self, under_way: tuple[_Rolled, int, float] | None) -> None:
        """An alarm was raised and the user wants no more steps: the best policy is served, and it is said."""
        if under_way is not None:
            self._finish(*under_way)
        self._validate(self.place.step)
        self._restore_best()
        raise TrainingFailed(
            f"Training stopped after {self.place.step} of {self.plan.steps} steps on an alarm",
            why="; ".join(f"{it.name}: {it.text}" for it in self.alarms.raised),
            hint='on_alarm="note" trains on; alarms={"length": 3.0, …} moves a threshold',
        )

    def _check_taught(self) -> None:
        """Silence is never success: a training in which no step changed anything has failed."""
        if self.report.trained or not self.plan.steps:
            return
        raise TrainingFailed(
            f"Nothing was trained in {counted(self.plan.steps, 'step')}",
            why=f"rollouts: {listed(self.report.outcomes)}; samples left out: {listed(self.report.dropped)}",
            hint="run the program once by hand: does it ask the policy, does the metric tell answers apart?",
        )

    def _go_back(self, rewound: Rewound) -> None:
        """To where the run is now: what was rolled out for the lost machine is worth nothing on this one."""
        self.report.rewinds += 1
        self._rewinds_in_a_row += 1
        if self._rewinds_in_a_row >= _REWINDS_IN_A_ROW:
            raise TrainingFailed(
                f"The run was rewound {self._rewinds_in_a_row} times without a step between",
                why=rewound.why,
                hint="`launch status` shows the run; its log says why the machine is lost each time",
            ) from rewound
        was = self.place.step
        # The status is newer than the error: another step may have been committed since.
        self.place = self.place.rewound(self.session.settle().client_state)
        # New ids: a rollout that began on the lost machine must not be mixed with one made here.
        self._token = uuid.uuid4().hex[:12]
        self.version = None
        self.history.append({"kind": "rewind", "from": was, "to": self.place.step})
        self.journal.note(
            f"the machine was lost: back from step {was} to step {self.place.step}, rolling out again"
        )

    # ------------------------------------------------------------- a step

    def _roll_out(self, step: int) -> _Rolled:
        began = time.monotonic()
        astray = self._astray()
        runs, limits = self._runs(step), self.plan.limits
        finished = run_all(self.program, runs, self.metric, self.adapter, limits, self.lm)
        grouped = build_groups(finished, self.plan.rules, f"{self._token}/s{step}")
        self.report.add_rollouts(grouped)
        self._say_notes(grouped)
        self._check(finished, self._astray() - astray)
        answered = [it for it in finished if it.outcome not in ("lost", "overdue")]
        return _Rolled(
            step,
            finished,
            grouped,
            parse_rate=sum(it.parsed for it in answered) / len(answered),
            cut_off_rate=sum(it.cut_off for it in answered) / len(answered),
            seconds=time.monotonic() - began,
        )

    def _runs(self, step: int) -> list[Run]:
        """E × K runs, each a rollout of its own: no answer from a cache, no two with one seed (C44)."""
        sampling = {"temperature": self.plan.temperature}
        return [
            Run(
                self.trainset[example],
                index,
                Rollout(
                    f"{self._token}-s{step}-e{index}-k{member}",
                    self._predictors,
                    sampling=sampling,
                    seed=f"{self.plan.seed}/{step}/{index}/{member}",
                ),
            )
            for index, example in enumerate(self.sampler.at(step))
            for member in range(self.plan.rollouts)
        ]

    def _say_notes(self, grouped: Grouped) -> None:
        """Each kind of trouble once, in full; from then on it is only counted."""
        for kind in [kind for kind in grouped.notes if kind not in self._said]:
            self._said.add(kind)
            self.journal.note(grouped.notes[kind])

    def _check(self, finished: Sequence[Finished], astray: int) -> None:
        check_answered(finished, "step")
        all_crashed = all(it.outcome == "crashed" for it in finished)
        self._crashed_in_a_row = self._crashed_in_a_row + 1 if all_crashed else 0
        if self._crashed_in_a_row >= _VAIN_STEPS_IN_A_ROW:
            raise TrainingFailed(
                f"The program raised in every rollout of {self._crashed_in_a_row} steps in a row",
                why=finished[0].reason,
                hint="run the program once by hand on an example of the trainset",
            )
        if astray:
            if not self.report.calls_outside_rollouts:
                self.journal.note(
                    f"{astray} calls came from threads the program started by itself: they belong to no "
                    "rollout and are not trained. Start them with dspy.Parallel, or in copy_context()"
                )
            self.report.calls_outside_rollouts += astray

    def _astray(self) -> int:
        return sum(policy.policy.astray for policy in self.policies)

    def _send(self, rolled: _Rolled) -> tuple[_Rolled, int, float] | None:
        """Queue the step; None when nothing of it can be trained. Every group rolled out is sent."""
        began = time.monotonic()
        why = "no rollout asked the policy"
        if astray := self.report.calls_outside_rollouts:
            why += f" ({astray} calls came from threads the program started by itself)"
        if rolled.grouped.groups:
            state = self.place.client_state(rolled.step + 1)
            try:
                status = self.session.step(rolled.grouped.groups, client_state=state, wait=False)
            except Refused as refused:
                if refused.code != "nothing_to_train":
                    raise
                why = refused.why or refused.message
                self.report.add_dropped(StepCounts.model_validate(refused.error.get("counts") or {}))
            else:
                self._empty_in_a_row = 0
                return rolled, status.id, began
        self._note_empty(rolled, why)
        return None

    def _note_empty(self, rolled: _Rolled, why: str) -> None:
        self.report.empty_steps += 1
        self._empty_in_a_row += 1
        self.place.step = rolled.step + 1
        outcomes = listed(rolled.grouped.outcomes)
        self.journal.note(f"step {rolled.step + 1} trained nothing: {why} (rollouts: {outcomes})")
        if self._empty_in_a_row >= _VAIN_STEPS_IN_A_ROW:
            raise TrainingFailed(
                f"{self._empty_in_a_row} steps in a row had nothing to train on",
                why=f"{why}; the last rollouts ended so: {outcomes}",
                hint="run the program once by hand: does it ask the policy, does the metric score it?",
            )

    def _finish(self, rolled: _Rolled, step_id: int, began: float) -> None:
        status = self.session.wait(step_id)
        self.version = status.version
        self.place.step = rolled.step + 1
        self._rewinds_in_a_row = 0
        self.report.add_step(status.counts)
        seconds = (rolled.seconds, time.monotonic() - began)
        epoch = self.sampler.epoch(rolled.step)
        rates = (rolled.parse_rate, rolled.cut_off_rate)
        line = StepLine.of(rolled.step + 1, epoch, rolled.grouped, rates, status, seconds)
        self.journal.step(line)
        if not status.counts.trained:
            self.journal.note("nothing to learn from in that step: each group's rewards were all the same")
        self.history.append({"kind": "step", **asdict(line)})
        seen = observe(rolled.step + 1, rolled.finished, rolled.grouped, rolled.cut_off_rate, status)
        self._ring(self.alarms.observe(seen))

    def _ring(self, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            self.journal.alarm(alarm)
            self.history.append({"kind": "alarm", **asdict(alarm)})
            self.report.alarms.append(alarm.name)

    # ------------------------------------------------------------- validation

    def _due(self, step: int) -> bool:
        """Whether there is a validation after `step` steps."""
        return step in (0, self.plan.steps) or step % self.plan.steps_for_validation == 0

    def _validate_if_due(self, step: int) -> None:
        if self._due(step):
            self._validate(step)

    def _validate(self, step: int) -> None:
        if not self.valset or self.place.validated(step):
            return
        began = time.monotonic()
        evaluation = self._evaluate(self.valset)
        if math.isnan(evaluation.score):
            raise TrainingFailed(
                f"The metric scored none of the {len(self.valset)} validation examples",
                why=next((it.reason for it in evaluation.finished if it.reason), None),
                hint="run the program and the metric once by hand on an example of the valset",
            )
        figures = evaluation.to_dict()
        if self.plan.report_train_scores:
            figures["train_score"] = self._evaluate(self.trainset).score
        checkpoint = self._checkpoint_of(evaluation.version)
        validated = Validated(step, evaluation.score, evaluation.parse_rate, checkpoint)
        best = self.place.add(validated)
        if best and checkpoint is not None and self.plan.keep != "none":
            self.session.pin(checkpoint)
        self.journal.validation(validated, figures, best, time.monotonic() - began)
        self.history.append({"kind": "validation", **asdict(validated), **figures, "best": best})
        self._ring(self.alarms.validated(step, evaluation.score))

    def _evaluate(self, examples: Sequence[dspy.Example]) -> Evaluation:
        return evaluate(
            self.program,
            examples,
            self.metric,
            session=self.session,
            adapter=self.adapter,
            num_threads=self.plan.limits.threads,
            rollout_seconds=self.plan.limits.run_seconds,
            rollout_calls=self.plan.limits.run_calls,
            failure_score=self.plan.rules.failure_score,
        )

    def _checkpoint_of(self, version: int | None) -> str | None:
        return next((it.name for it in self.session.checkpoints() if it.version == version), None)

    def _restore_best(self) -> None:
        """Serve the best validated policy, when it is better than the last one."""
        best, last = self.place.best, self.place.scores[-1] if self.place.scores else None
        if self.plan.keep == "none" or best is None or last is None or best.score <= last.score:
            return
        if self.place.restored is not None:
            return  # before the program was restarted
        words = f"validation was best after {best.step} steps ({best.score:.3f}, at the end {last.score:.3f})"
        if best.checkpoint is None:
            self.journal.note(
                f"{words}: that is the model itself, still served as 'base'; no step improved on it"
            )
            return
        self.place.restored = best.checkpoint
        self.session.restore(best.checkpoint, client_state=self.place.client_state(self.plan.steps))
        self.journal.note(f"{words}: {best.checkpoint} is served again")
