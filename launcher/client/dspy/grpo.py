"""A DSPy optimizer that trains the weights of a program's policy with GRPO on this run.

    from launcher.client import GRPO
    optimizer = GRPO(metric=metric, num_train_steps=20, num_rollouts_per_grpo_step=8)
    program = optimizer.compile(program, trainset=train, valset=val)

Its parameters are those of dspy.GRPO and ArborGRPO, each with its meaning or refused by name. The loop is our
own, because theirs trains re-rendered text and throws rollouts away. Neighbours: `grpo_config.py` checks the
parameters, `compile_start.py` finds the beginning, `training.py` is the loop. Knows nothing of HTTP.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import dspy
from dspy.teleprompt import Teleprompter

from launcher.client.dspy import version_pinning
from launcher.client.dspy.compile_start import begin_compile, record_version
from launcher.client.dspy.engine import BASE_MODEL
from launcher.client.dspy.examples import TrainingData, check_examples, example_warnings
from launcher.client.dspy.grouping import Grouping
from launcher.client.dspy.grpo_config import (
    DEFAULT_ROLLOUTS,
    CheckpointMode,
    GRPOConfig,
    OnAlarm,
    check_sampling,
    deprecated_name_warnings,
    resolve_num_rollouts,
    value_for_policy,
)
from launcher.client.dspy.programs import (
    TrainedPredictors,
    attach_policy,
    policy_lm_text,
    sampling_warnings,
    strict_adapter,
    with_own_lms,
)
from launcher.client.dspy.report import Journal, Report, plural
from launcher.client.dspy.rollout_collector import sampling_notes
from launcher.client.dspy.rollouts import RolloutLimits, Runner
from launcher.client.dspy.sampler import EpochSampler
from launcher.client.dspy.scoring import Metric, metric_arity
from launcher.client.dspy.training import Training
from launcher.client.dspy.training_place import OptimizerWork
from launcher.client.dspy.version_names import parse_version
from launcher.client.session import Session, connect
from launcher.client.staleness import check_staleness
from launcher.client.train_kwargs import ResolvedTrainKwargs, resolve

_MIN_METRIC_FAILURES = 16


class GRPO(Teleprompter):
    """Trains every predictor of the student that uses the policy, jointly, with a group each.

    One step takes `num_dspy_examples_per_grpo_step` examples and runs the student
    `num_rollouts_per_grpo_step` times on each, at `train_kwargs["temperature"]` (default 1.0). The metric's
    score is the reward of all samples in a run; a metric may add `predictor_scores={name: score}` to its
    `dspy.Prediction(score=...)` to judge predictors one by one. An answer that does not parse, or was cut off
    at its length limit, gives its predictor `format_failure_score`; a program that raises, `failure_score`; a
    metric that raises or returns None excludes the run, which is counted. A metric that always does fails the
    training. So does an endpoint that stays away, and a training in which no step taught anything.

    Every `num_steps_for_val` steps, before the first and after the last the student is scored greedily on the
    `valset` (`use_train_as_val` takes the trainset). `checkpoint`: "single-best" and "improvements" pin each
    improvement (`Session.pin`) and serve the best at the end; "none" does neither. `dynamic_sampling`: if all
    rewards of an example are equal another one is rolled out, with at most three times the step's rollouts
    more (True), so many more (a number) or none (False).

    `staleness` N rolls out up to N steps ahead of the one that trains: a step takes the first examples that
    are done. An example that is not done goes into a later step. If it would be older than N steps, it is
    left out, counted and replaced. Validations go on beside them.

    A run that takes longer than `rollout_seconds`, the metric's time included, is left behind and excluded;
    one that calls the policy more than `rollout_calls` times is stopped and gets the failure score. A run
    that another model or a judge failed is excluded, and counted by that model. `num_threads` runs go on at
    once; None is as many as the engines have places for, up to 256 or a step's.

    `train_kwargs` are those of Arbor and TRL, for these steps alone: learning rate, schedule, loss, clips and
    so on change each step. Keywords that were decided when the run started (LoRA, GPUs) are compared, and a
    difference is refused with the `launch` line that fits. A keyword without effect is logged. They and
    `adapter` may be given by LM, if all LMs are the policy. `num_samples_per_input` is an older name of
    num_rollouts_per_grpo_step.

    `resume` None goes on where a killed life of this program stopped, when `launch --resume` has started it
    again; any other program begins at step 0, on the present policy. True goes on after the run's last step,
    whichever program made it; False never does.

    Alarms (see `alarms.Thresholds`, changed by `alarms={"length": 3.0}`) are logged once each;
    `on_alarm="stop"` ends the training at the first, with the best policy served.

    `exclude_demos=True` trains, and leaves, the student without demos. A predictor that some runs call more
    often than others is trained on all its calls ("ragged"), or with
    `variably_invoked_predictor_grouping_mode="truncate"` on as many as each run of the example made; "fill"
    is refused, as is `multitask=False`.

    After `compile`, also after one that raised: `report` has the totals, `history` each step, validation and
    alarm, `summary` the figures (`had_finished`: an earlier life of this program had done every step).
    """

    # Another room's optimizer may have another loop around the same steps.
    _training_class: type[Training] = Training
    # How its users write an LM of the run.
    _lm_text = staticmethod(policy_lm_text)

    def __init__(
        self,
        metric: Callable[..., Any],
        *,
        train_kwargs: Mapping[str, Any] | Mapping[dspy.LM, Mapping[str, Any]] | None = None,
        adapter: dspy.Adapter | Mapping[dspy.LM, dspy.Adapter] | None = None,
        exclude_demos: bool = False,
        multitask: bool = True,
        num_threads: int | None = None,
        num_train_steps: int = 100,
        seed: int = 0,
        num_dspy_examples_per_grpo_step: int = 4,
        num_rollouts_per_grpo_step: int = DEFAULT_ROLLOUTS,
        use_train_as_val: bool = False,
        num_steps_for_val: int = 5,
        report_train_scores: bool = False,
        failure_score: float = 0.0,
        format_failure_score: float = -1.0,
        variably_invoked_predictor_grouping_mode: Grouping = "ragged",
        variably_invoked_predictor_fill_strategy: None = None,
        checkpoint: CheckpointMode = "single-best",
        staleness: int = 0,
        dynamic_sampling: bool | int | None = False,
        rollout_seconds: float = RolloutLimits.run_seconds,
        rollout_calls: int = RolloutLimits.run_calls,
        alarms: Mapping[str, float] | None = None,
        on_alarm: OnAlarm = "note",
        resume: bool | None = None,
        session: Session | None = None,
        num_samples_per_input: int | None = None,
    ) -> None:
        super().__init__()
        self.metric = metric
        self.train_kwargs = train_kwargs or {}
        self.adapter = adapter
        self.exclude_demos = exclude_demos
        self.multitask = multitask
        self.num_threads = num_threads
        self.num_train_steps = num_train_steps
        self.seed = seed
        self.num_dspy_examples_per_grpo_step = num_dspy_examples_per_grpo_step
        self.num_rollouts_per_grpo_step = resolve_num_rollouts(
            num_rollouts_per_grpo_step, num_samples_per_input
        )
        self.num_samples_per_input = num_samples_per_input
        self.use_train_as_val = use_train_as_val
        self.num_steps_for_val = num_steps_for_val
        self.report_train_scores = report_train_scores
        self.failure_score = failure_score
        self.format_failure_score = format_failure_score
        self.variably_invoked_predictor_grouping_mode: Grouping = variably_invoked_predictor_grouping_mode
        self.variably_invoked_predictor_fill_strategy = variably_invoked_predictor_fill_strategy
        self.checkpoint: CheckpointMode = checkpoint
        self.staleness = staleness
        self.dynamic_sampling = False if dynamic_sampling is None else dynamic_sampling
        self.rollout_seconds = rollout_seconds
        self.rollout_calls = rollout_calls
        self.alarms = alarms
        self.on_alarm: OnAlarm = on_alarm
        self.resume = resume
        self.session = session
        self.report = Report()
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        metric_arity(metric)
        self._config()

    def _config(self) -> GRPOConfig:
        """The settings as they are now, checked: a program may have changed one of these attributes."""
        return GRPOConfig(**{it.name: getattr(self, it.name) for it in fields(GRPOConfig)})

    def compile(  # positional too, as dspy.GRPO's is
        self,
        student: dspy.Module,
        trainset: Sequence[dspy.Example],
        teacher: dspy.Module | list[dspy.Module] | None = None,
        valset: Sequence[dspy.Example] | None = None,
        **kwargs: Any,
    ) -> dspy.Module:
        """Train; returns the student itself, whose predictors use the trained version by its name.

        To compare, take a copy made before, which goes on using its own version, or `PolicyLM(model="base")`,
        the model before any training. Raises TypeError and ValueError for a program that cannot be trained,
        EndpointLost, StepFailed and TrainingFailed when training cannot go on.
        """
        if kwargs:
            raise TypeError(f"GRPO.compile() does not accept {', '.join(sorted(kwargs))}")
        config = self._config()
        teachers = teacher if isinstance(teacher, list) else [teacher]
        if any(it is not None and it is not student for it in teachers):
            raise ValueError("GRPO learns from the student's own rollouts; it takes no teacher")
        examples, held_out = check_examples("trainset", trainset), check_examples("valset", valset)
        if not examples:
            raise ValueError("the trainset is empty")
        if config.use_train_as_val and held_out:
            raise ValueError("give a valset or use_train_as_val=True, not both")
        session = self.session or connect()
        trained = attach_policy(student, session, lm_text=self._lm_text)
        train_kwargs = value_for_policy("train_kwargs", config.train_kwargs, session)
        check_sampling(train_kwargs, trained.policies)
        resolved = resolve(session.connection, train_kwargs, config.num_train_steps)
        # The newest version, whichever an earlier compile left here.
        trained = with_own_lms(student, trained, session.model)
        training = self._training(config, resolved, student, trained, session, examples, held_out)
        if note := version_pinning.pin_copies(student, session):
            training.journal.note(note)
        try:
            if not training.place.superseded:
                training.run()
        finally:
            self._collect_results(training)
        self._pin_program_version(training, trained)
        student._compiled = True
        return student

    def _training(
        self,
        config: GRPOConfig,
        resolved: ResolvedTrainKwargs,
        student: dspy.Module,
        trained: TrainedPredictors,
        session: Session,
        trainset: list[dspy.Example],
        valset: list[dspy.Example],
    ) -> Training:
        status = session.status()
        check_staleness(config.staleness, status.max_staleness)
        steps, per_step = config.num_train_steps, config.num_dspy_examples_per_grpo_step
        journal = Journal(session.run_dir, steps)
        held_out = trainset if config.use_train_as_val else valset
        work = self._optimizer_work(config, trained, len(trainset))
        place = begin_compile(work, session, journal, held_out=held_out, steps=steps, resume=config.resume)
        changed = place.change_settings(resolved.changed_settings)
        journal.begin(place)
        journal.note(
            f"training {', '.join(trained.names)} of {type(student).__name__}, the given object itself: "
            f"{plural(steps, 'step')} of {per_step} examples × {config.num_rollouts_per_grpo_step} rollouts"
        )
        limits = config.limits(status.places)
        for note in (
            *trained.notes,
            *resolved.notes,
            *([changed] if changed else []),
            *deprecated_name_warnings(self.num_samples_per_input),
            *self._remove_demos(student),
            *sampling_warnings(trained.policies, resolved.temperature),
            *example_warnings(trainset, valset, per_step),
            *sampling_notes(config, limits),
        ):
            journal.note(note)
        metric = Metric(self.metric, max(_MIN_METRIC_FAILURES, 2 * config.num_rollouts_per_grpo_step))
        adapter = strict_adapter(value_for_policy("adapter", config.adapter, session))
        runner = Runner(student, trained, metric, adapter, limits)
        data = TrainingData(trainset, held_out, EpochSampler(len(trainset), per_step, config.seed))
        overlong = {**status.settings, **resolved.changed_settings}.get("overlong", "mask")
        return self._training_class(
            config, resolved, runner, data, session, place, journal, drops_truncated=overlong == "mask"
        )

    def _remove_demos(self, student: dspy.Module) -> list[str]:
        """Remove the demos if `exclude_demos` is set; else they are sampled and trained with the rest."""
        count = sum(len(predictor.demos) for predictor in student.predictors())
        if not count:
            return []
        if not self.exclude_demos:
            return [f"the student's {count} demos stay in its prompts and in what is trained"]
        for predictor in student.predictors():
            predictor.demos = []
        return [f"exclude_demos: the student's {count} demos were removed permanently"]

    def _optimizer_work(self, config: GRPOConfig, trained: TrainedPredictors, examples: int) -> OptimizerWork:
        return OptimizerWork(
            program=Path(sys.argv[0]).name if sys.argv else "",
            metric=getattr(self.metric, "__qualname__", type(self.metric).__qualname__),
            predictors=trained.names,
            examples=examples,
            seed=config.seed,
            examples_per_step=config.num_dspy_examples_per_grpo_step,
            rollouts=config.num_rollouts_per_grpo_step,
        )

    def _pin_program_version(self, training: Training, trained: TrainedPredictors) -> None:
        """Make the program use the version it was compiled to by its name, whatever is trained after it
        (C55)."""
        if (name := training.place.made) is not None:
            version = int(parse_version(name) or 0)
        else:
            version, name = training.final_version or training.served.pin()
        record_version(training.place, name, training.session)
        self.summary["version"] = version
        for policy in trained.policies:
            policy.use_version(name)
        training.journal.note(
            f"the program now uses {name}; the model before training is available as "
            f"{self._lm_text(BASE_MODEL)}"
        )

    def _collect_results(self, training: Training) -> None:
        """Copy the training's results, also when it failed; sends no request, as the endpoint may be gone."""
        self.report = training.journal.report
        self.history = training.journal.history
        scores = training.place.scores
        self.summary = {
            "compile": training.place.id,
            "steps": training.place.step,
            "version": training.served.version,
            "before": scores[0].score if scores else None,
            "after": scores[-1].score if scores else None,
            "best": training.place.best.score if training.place.best else None,
            "restored": training.place.restored,
            "had_finished": training.had_finished,
            "report": self.report.to_dict(),
        }
