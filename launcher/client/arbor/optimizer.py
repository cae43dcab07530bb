"""Arbor's optimizer by its name: our GRPO with Arbor's own defaults and spellings.

`arguments.py` translates Arbor's arguments and logs each once; `stoppable_training.py` lets the job be shut
down, `adapter_copy.py` brings the best adapter to a folder of the user's. The training is
`client/dspy/grpo.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dspy

from launcher.client.arbor import jobs, server
from launcher.client.arbor.adapter_copy import copy_best_adapter
from launcher.client.arbor.arbor_provider import ArborProvider, arbor_lm_text
from launcher.client.arbor.arguments import (
    ByLM,
    check_arbor_arguments,
    resolve_checkpoint,
    resolve_grouping,
    resolve_multitask,
    resolve_num_rollouts,
    value_for_program,
)
from launcher.client.arbor.jobs import Job
from launcher.client.arbor.stderr_log import log
from launcher.client.arbor.stoppable_training import StoppableTraining
from launcher.client.arbor.validations import ArborValidations
from launcher.client.dspy.grpo import GRPO
from launcher.client.dspy.grpo_config import check_train_kwargs
from launcher.client.dspy.training import Training


class ArborGRPO(GRPO):
    """GRPO with ArborGRPO's parameters, in their order, with their defaults; `GRPO` explains each.

    As in Arbor, `exclude_demos` must be True, and `use_train_as_val` needs `report_train_scores`. Unlike in
    Arbor, one step makes one update of all its groups, and the last step is validated too. `train_kwargs` and
    `adapter` may be given by LM. `checkpoint` may be a folder: the best adapter is put there at the end, as
    PEFT writes it. The parameters behind `checkpoint` are older spellings and GRPO's.

    While it trains and afterwards: `job` (its `id` is for `arbor.watch_job` and `arbor.shutdown_job`; its
    `checkpoints` and `last_checkpoint` are there at the end), `validation_scores` by step (-1 is before
    training; in percent, as dspy.Evaluate has them), `best_validation_score` and `best_validation_step`.
    """

    _training_class = StoppableTraining
    _lm_text = staticmethod(arbor_lm_text)

    def __init__(
        self,
        metric: Callable[..., Any] | None = None,
        train_kwargs: Mapping[str, Any] | ByLM | None = None,
        adapter: dspy.Adapter | Mapping[dspy.LM, dspy.Adapter] | None = None,
        exclude_demos: bool = False,
        num_threads: int | None = 6,
        num_train_steps: int = 500,
        seed: int = 0,
        num_dspy_examples_per_grpo_step: int = 1,
        num_rollouts_per_grpo_step: int | None = None,
        use_train_as_val: bool = False,
        num_steps_for_val: int = 5,
        report_train_scores: bool = False,
        failure_score: float = 0,
        format_failure_score: float = -1,
        variably_invoked_predictor_grouping_mode: str = "truncate",
        variably_invoked_predictor_fill_strategy: str | None = None,
        checkpoint: str = "single-best",
        *,
        multitask: bool | None = None,
        num_samples_per_input: int | None = None,
        **grpo_kwargs: Any,
    ) -> None:
        check_arbor_arguments(metric, exclude_demos, use_train_as_val, report_train_scores)
        keep, self._folder = resolve_checkpoint(checkpoint)
        self._train_kwargs, self._adapter = train_kwargs, adapter
        self.job: Job | None = None
        super().__init__(
            metric,  # pyrefly: ignore[bad-argument-type] - checked above
            train_kwargs=value_for_program(train_kwargs, None),
            adapter=value_for_program(adapter, None),
            exclude_demos=exclude_demos,
            multitask=resolve_multitask(multitask),
            num_threads=num_threads,
            num_train_steps=num_train_steps,
            seed=seed,
            num_dspy_examples_per_grpo_step=num_dspy_examples_per_grpo_step,
            num_rollouts_per_grpo_step=resolve_num_rollouts(
                num_rollouts_per_grpo_step, num_samples_per_input
            ),
            use_train_as_val=use_train_as_val,
            num_steps_for_val=num_steps_for_val,
            report_train_scores=report_train_scores,
            failure_score=failure_score,
            format_failure_score=format_failure_score,
            variably_invoked_predictor_grouping_mode=resolve_grouping(
                variably_invoked_predictor_grouping_mode, variably_invoked_predictor_fill_strategy
            ),
            checkpoint=keep,
            **grpo_kwargs,
        )

    def compile(  # positional too, as Arbor's is
        self,
        student: dspy.Module,
        trainset: Sequence[dspy.Example],
        teacher: dspy.Module | list[dspy.Module] | None = None,
        valset: Sequence[dspy.Example] | None = None,
        **kwargs: Any,
    ) -> dspy.Module:
        """Like `GRPO.compile`; the LM's model must be the run's. The best adapter is copied at the end."""
        self.job = None
        lms = _lms(student)
        self.train_kwargs = value_for_program(self._train_kwargs, lms) or {}
        check_train_kwargs(self.train_kwargs)
        self.adapter = value_for_program(self._adapter, lms)
        self.session = self.session or server.session()
        for name in {it.model for it in lms if isinstance(getattr(it, "provider", None), ArborProvider)}:
            server.check_model(self.session, name)
        try:
            program = super().compile(student, trainset, teacher, valset, **kwargs)
        except BaseException as error:
            self._end_job(f"{type(error).__name__}: {error}")
            raise
        self._end_job(None)
        if self._folder is not None:
            copy_best_adapter(self._folder, self._best_checkpoint(), self.session.run_dir)
        return program

    # ------------------------------------------------------------- attributes for Arbor's users

    @property
    def validation_scores(self) -> dict[int, float]:
        """The score of each validation in percent, by Arbor's step: -1 is before training, 0 after step 1."""
        return self._validations.scores

    @property
    def best_validation_score(self) -> float | None:
        """The highest of them."""
        return self._validations.best_score

    @property
    def best_validation_step(self) -> int | None:
        """Where it was."""
        return self._validations.best_step

    # ------------------------------------------------------------- how

    def _training(self, *words: Any, **named: Any) -> Training:
        training = super()._training(*words, **named)
        self.job = Job(training.place.id, self.num_train_steps, training.journal.history)
        assert isinstance(training, StoppableTraining)
        training.job = self.job
        jobs.add(self.job)
        log(f"job {self.job.id} (arbor.watch_job(…) follows it, arbor.shutdown_job(…) ends it)")
        return training

    def _end_job(self, failure: str | None) -> None:
        job = self.job
        if job is None:
            return
        job.checkpoints = self._validations.checkpoints(self.checkpoint)
        job.last_checkpoint = next(reversed(job.checkpoints), None)
        job.failure = failure
        job.is_over.set()

    @property
    def _validations(self) -> ArborValidations:
        history = self.job.history if self.job is not None else self.history
        run_dir = self.session.run_dir if self.session is not None else None
        return ArborValidations(history, run_dir)

    def _best_checkpoint(self) -> str | None:
        """That of the best validation, or of the last step if nothing was validated; None: of none."""
        if self._validations.scores:
            return self._validations.best_checkpoint
        version = self.summary.get("version")
        return f"step-{version:06d}" if version else None


def _lms(student: Any) -> list[Any]:
    """The LMs that the program's predictors ask, the configured one for those that have none."""
    if not isinstance(student, dspy.Module):
        return []  # refused by name where it is looked at
    found = [it.lm or dspy.settings.lm for it in student.predictors()]
    return list({id(lm): lm for lm in found if lm is not None}.values())
