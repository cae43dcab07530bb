"""A DSPy optimizer that trains the weights of a program's policy with GRPO on this run.

    from launcher.client import GRPO
    optimizer = GRPO(metric=metric, num_train_steps=20, num_rollouts_per_grpo_step=8)
    program = optimizer.compile(program, trainset=train, valset=val)

Its parameters are those of dspy.GRPO and ArborGRPO where they make sense here; the loop is our own, because
theirs trains re-rendered text and throws rollouts away (facts/dspy.md). Neighbours: `training.py` is the
loop; this file says what may be asked for and checks it. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import dspy
from dspy.teleprompt import Teleprompter

from launcher.client.grouping import Rules
from launcher.client.place import Place, fingerprint
from launcher.client.programs import Trained, attach, strict_adapter
from launcher.client.report import Journal, Report
from launcher.client.rollouts import Limits
from launcher.client.sampler import EpochSampler
from launcher.client.scoring import Metric
from launcher.client.session import Session, connect
from launcher.client.training import Keep, Plan, Training

# Values that leave the policy's own distribution: accepted, as other optimizers want them said.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1, 1.0, None),
    "top_k": (-1, 0, None),
    "min_p": (0, 0.0, None),
    "repetition_penalty": (1, 1.0, None),
}
_LEAST_METRIC_PATIENCE = 16

# How many optimizers this process has compiled on each run: their order tells their places apart after a
# restart.
_compiles: Counter[str] = Counter()


class GRPO(Teleprompter):
    """Trains every predictor of the student that asks the policy, jointly, with a group each.

    One step takes `num_dspy_examples_per_grpo_step` examples and runs the student
    `num_rollouts_per_grpo_step` times on each, at `train_kwargs["temperature"]` (default 1.0). The metric's
    score is the reward of all that was sampled in a run; a metric may add `predictor_scores={name: score}` to
    its `dspy.Prediction(score=...)` to judge predictors by themselves. An answer that does not parse, or was
    cut off at its length limit, gives its predictor `format_failure_score`; a program that raises,
    `failure_score`; a metric that raises or returns None excludes the run, counted, and one that always does
    fails the training.

    Every `num_steps_for_val` steps, before the first and after the last the student is scored greedily on the
    `valset` (`use_train_as_val` takes the trainset). `checkpoint`: "single-best" and "improvements" pin each
    improvement and serve the best at the end; "none" neither. `staleness=1` rolls out the next step while one
    trains. Learning rate, LoRA and the loss belong to the run: `launch --set train.learning_rate=1e-5 …`.

    After `compile`: `report` has the totals, `history` each step and validation, `summary` the figures.
    """

    def __init__(
        self,
        metric: Callable[..., Any],
        *,
        train_kwargs: Mapping[str, Any] | None = None,
        adapter: dspy.Adapter | None = None,
        num_threads: int = 16,
        num_train_steps: int = 100,
        seed: int = 0,
        num_dspy_examples_per_grpo_step: int = 4,
        num_rollouts_per_grpo_step: int = 8,
        use_train_as_val: bool = False,
        num_steps_for_val: int = 5,
        report_train_scores: bool = False,
        failure_score: float = 0.0,
        format_failure_score: float = -1.0,
        checkpoint: Keep = "single-best",
        staleness: int = 0,
        rollout_seconds: float = 1200.0,
        session: Session | None = None,
    ) -> None:
        super().__init__()
        self.metric = metric
        self.train_kwargs = dict(train_kwargs or {})
        self.adapter = adapter
        self.num_threads = num_threads
        self.num_train_steps = num_train_steps
        self.seed = seed
        self.num_dspy_examples_per_grpo_step = num_dspy_examples_per_grpo_step
        self.num_rollouts_per_grpo_step = num_rollouts_per_grpo_step
        self.use_train_as_val = use_train_as_val
        self.num_steps_for_val = num_steps_for_val
        self.report_train_scores = report_train_scores
        self.failure_score = failure_score
        self.format_failure_score = format_failure_score
        self.checkpoint: Keep = checkpoint
        self.staleness = staleness
        self.rollout_seconds = rollout_seconds
        self.session = session
        self.report = Report()
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self._check_parameters()

    def compile(  # pyright: ignore[reportIncompatibleMethodOverride] - positional too, as dspy.GRPO's is
        self,
        student: dspy.Module,
        trainset: Sequence[dspy.Example],
        teacher: dspy.Module | None = None,
        valset: Sequence[dspy.Example] | None = None,
        **kwargs: Any,
    ) -> dspy.Module:
        """Train; the student itself is returned, its predictors asking the policy as trained.

        Resumes where a killed run of the same program stopped. Raises ValueError for what cannot be trained,
        EndpointLost, StepFailed and TrainingFailed when training cannot go on.
        """
        if kwargs:
            raise TypeError(f"GRPO.compile() does not take {', '.join(sorted(kwargs))}")
        if teacher is not None and teacher is not student:
            raise ValueError("GRPO learns from the student's own rollouts; it takes no teacher")
        if not trainset:
            raise ValueError("the trainset is empty")
        if self.use_train_as_val and valset:
            raise ValueError("give a valset or use_train_as_val=True, not both")
        session = self.session or connect()
        trained = attach(student, session)
        training = self._training(student, trained, session, list(trainset), list(valset or ()))
        if not training.place.superseded:
            training.run()
        self._take_over(training, session)
        for policy in trained.policies:
            policy.model = f"{session.model}@v{session.version}"
        student._compiled = True
        return student

    def _training(
        self,
        student: dspy.Module,
        trained: Trained,
        session: Session,
        trainset: list[dspy.Example],
        valset: list[dspy.Example],
    ) -> Training:
        for policy in trained.policies:
            policy.model = session.model  # the newest version, whichever an earlier compile left here
        journal = Journal(session.run_dir, self.num_train_steps)
        place = self._place(trained, len(trainset), session, journal)
        journal.note(
            f"training {', '.join(trained.names)} of {type(student).__name__}, the given object itself: "
            f"{self.num_train_steps} steps of {self.num_dspy_examples_per_grpo_step} examples × "
            f"{self.num_rollouts_per_grpo_step} rollouts"
        )
        for note in trained.notes:
            journal.note(note)
        patience = max(_LEAST_METRIC_PATIENCE, 2 * self.num_rollouts_per_grpo_step)
        return Training(
            program=student,
            policies=trained.policies,
            trainset=trainset,
            valset=trainset if self.use_train_as_val else valset,
            metric=Metric(self.metric, patience),
            adapter=strict_adapter(self.adapter),
            session=session,
            sampler=EpochSampler(len(trainset), self.num_dspy_examples_per_grpo_step, self.seed),
            plan=self._plan(),
            place=place,
            journal=journal,
        )

    def _place(self, trained: Trained, examples: int, session: Session, journal: Journal) -> Place:
        """Where to begin: at the first step, or where the run says a killed program of this kind was."""
        ordinal = _compiles[session.endpoint.root]
        _compiles[session.endpoint.root] += 1
        per_step, rollouts = self.num_dspy_examples_per_grpo_step, self.num_rollouts_per_grpo_step
        fresh = Place(fingerprint(trained.names, examples, self.seed, per_step, rollouts), self.seed, ordinal)
        status = session.settle()
        place = fresh.resumed(status.client_state)
        if place is not None and place.superseded:
            journal.note(
                "this optimizer had finished before the program was restarted: nothing left to train"
            )
        elif place is not None:
            journal.note(f"resuming after {place.step} of {self.num_train_steps} steps")
        elif status.step:
            journal.note(f"starting at step 0 on the policy as it is now (v{status.version})")
        return place or fresh

    def _plan(self) -> Plan:
        return Plan(
            steps=self.num_train_steps,
            rollouts=self.num_rollouts_per_grpo_step,
            temperature=float(self.train_kwargs.get("temperature", 1.0)),
            seed=self.seed,
            limits=Limits(self.num_threads, self.rollout_seconds),
            rules=Rules(self.failure_score, self.format_failure_score),
            steps_for_validation=self.num_steps_for_val,
            keep=self.checkpoint,
            staleness=self.staleness,
            report_train_scores=self.report_train_scores,
        )

    def _take_over(self, training: Training, session: Session) -> None:
        self.report = training.report
        self.history = training.history
        scores = training.place.scores
        self.summary = {
            "steps": training.place.step,
            "version": session.version,
            "before": scores[0].score if scores else None,
            "after": scores[-1].score if scores else None,
            "best": training.place.best.score if training.place.best else None,
            "restored": training.place.restored,
            "report": training.report.to_dict(),
        }

    def _check_parameters(self) -> None:
        for name in (
            "num_threads",
            "num_train_steps",
            "num_dspy_examples_per_grpo_step",
            "num_steps_for_val",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.num_rollouts_per_grpo_step < 2:
            raise ValueError(
                "num_rollouts_per_grpo_step must be at least 2: a rollout is compared with its group"
            )
        if self.format_failure_score >= self.failure_score:
            raise ValueError("format_failure_score must be below failure_score")
        if self.checkpoint not in get_args(Keep):
            raise ValueError(f"checkpoint must be one of {', '.join(get_args(Keep))}")
        if self.staleness not in (0, 1):
            raise ValueError("staleness must be 0 or 1")
        _check_train_kwargs(self.train_kwargs)


def _check_train_kwargs(train_kwargs: Mapping[str, Any]) -> None:
    """Only the temperature is ours to set; what narrows the distribution would be trained wrongly (C9)."""
    for name, value in train_kwargs.items():
        if name == "temperature":
            if not 0 < float(value) <= 2:
                raise ValueError("train_kwargs: temperature must be above 0 and at most 2")
        elif name not in _NEUTRAL:
            raise ValueError(
                f"train_kwargs: {name} is not set here but where the run starts: "
                f"launch --set train.{name}=… (`launch config` lists the keys)"
            )
        elif value not in _NEUTRAL[name]:
            raise ValueError(
                f"train_kwargs: {name}={value!r} samples from another distribution than the policy's"
            )
