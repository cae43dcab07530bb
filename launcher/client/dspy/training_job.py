"""One `lm.finetune(…)` of DSPy: supervised steps of the run, whose last version is the LM that comes out.

Neighbours: `provider.py` hands it over, `sft_plan.py` chooses the examples of each step,
`job_train_kwargs.py` resolves its other keywords, `finetune_data.py` keeps the examples for a restarted
program. There is one policy: each job goes on from the newest version, and jobs that DSPy starts at once take
turns, in the order in which it made them. Knows nothing of programs or rewards.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

from dspy.clients.provider import TrainingJob
from dspy.clients.utils_finetune import TrainDataFormat, TrainingStatus
from pydantic import ValidationError

from launcher.base.sanitize import plain_text as sanitized
from launcher.client.dspy import finetune_data, version_names, version_pinning
from launcher.client.dspy.compile_start import record_version
from launcher.client.dspy.job_places import begin_job
from launcher.client.dspy.job_train_kwargs import resolve_for_job
from launcher.client.dspy.sft_plan import SFTPlan
from launcher.client.dspy.version_names import parse_version
from launcher.client.failures import Rewound, TrainingFailed
from launcher.client.no_progress import NoProgressGuard, NothingToTrain
from launcher.client.request_bodies import SupervisedExample
from launcher.client.schema import StepStatus
from launcher.client.session import Session
from launcher.client.train_kwargs import ResolvedTrainKwargs
from launcher.client.train_once import train_once

_NO_ANSWERS = "a conversation is learned by its assistant's messages whose weight is not 0: has it any?"

_lock = threading.Lock()
_last: threading.Event | None = None


class SlipwayTrainingJob(TrainingJob):
    """`result()` is the trained LM, or raises; `cancel()` ends it after the step in progress."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        global _last
        self._over = threading.Event()
        self._status = TrainingStatus.pending
        with _lock:
            self._before, _last = _last, self._over

    def cancel(self) -> bool:
        """Take no further step. The steps so far stay trained, and are no version of this job's."""
        return super(TrainingJob, self).cancel()

    def status(self) -> TrainingStatus:
        """Where it stands."""
        return TrainingStatus.cancelled if self.cancelled() else self._status

    def set_result(self, result: Any) -> None:
        """Take the result that DSPy hands over, which may be an exception."""
        if self.cancelled():
            return
        if isinstance(result, BaseException):
            self._status = TrainingStatus.failed
            self.set_exception(result)
        else:
            self._status = TrainingStatus.succeeded
            super().set_result(result)

    def train(
        self,
        session: Session,
        model: str,
        train_data: Sequence[Mapping[str, Any]],
        train_data_format: Any,
        train_kwargs: Mapping[str, Any],
    ) -> str:
        """Take all steps. Returns the name of the version they made, with the prefix that `model` has.

        Raises TrainingFailed and ValueError for data that cannot be trained, StepFailed, EndpointLost, and
        CancelledError.
        """
        try:
            if self._before is not None:
                self._before.wait()
            self._status = TrainingStatus.running
            examples = _examples(train_data, train_data_format)
            imitation = _SFTSteps(self, session, examples, train_kwargs)
            imitation.warn_about_start_version(model)
            return version_names.with_provider_prefix(imitation.run(), model)
        finally:
            self._over.set()


class _SFTSteps:
    """The steps of one job."""

    def __init__(
        self,
        job: SlipwayTrainingJob,
        session: Session,
        examples: Sequence[SupervisedExample],
        train_kwargs: Mapping[str, Any],
    ) -> None:
        self.job, self.session = job, session
        plan = SFTPlan.of(len(examples), train_kwargs)
        self.resolved: ResolvedTrainKwargs = resolve_for_job(session, train_kwargs, self.note, plan.steps)
        if note := version_pinning.pin_copies_except((), session):
            self.note(note)
        self.place = begin_job("dspy finetune", train_kwargs, session)
        self.examples = finetune_data.load_or_save(session.run_dir, self.place, examples)
        self.plan = SFTPlan.of(len(self.examples), train_kwargs)
        self.last: StepStatus | None = None
        self._guard = NoProgressGuard(session.max_empty_steps)
        # Of the last step that had nothing to train.
        self._why_empty: str | None = None

    def note(self, text: str) -> None:
        """A line for people."""
        sys.stderr.write(f"finetune: {sanitized(text)}\n")
        sys.stderr.flush()

    def warn_about_start_version(self, model: str) -> None:
        """Log that training starts from the newest version, and not from an older one or the base model."""
        named, newest = parse_version(model), self.session.version
        if model.rpartition("/")[2] == "base" or (named is not None and int(named) != newest):
            self.note(f"the policy is one: this goes on from v{newest}, not from {model}")

    def run(self) -> str:
        """Take the steps that are left, and have the version kept; its name."""
        self._log_start()
        while self.place.step < self.plan.steps and not self.place.superseded:
            if self.job.cancelled() or _main_thread_ended():
                self.note(f"cancelled after {self.place.step} of {self.plan.steps} steps")
                raise CancelledError
            self._step()
        if self._why_empty is not None and not self.place.trained:
            raise TrainingFailed("Nothing was trained", self._why_empty, _NO_ANSWERS)
        name = self.place.made or self._pin_last()
        record_version(self.place, name, self.session)
        self.note(f"the trained LM is {name}")
        return name

    def _pin_last(self) -> str:
        if self.last is not None and self.last.version is not None:
            version, weights = self.last.version, (self.last.publication or {}).get("sha256")
        else:  # all of it was trained before a restart
            version = self.session.version
            weights = version_names.weights_hash(self.session, version)
        return version_names.pin_version(self.session, version, weights)

    def _log_start(self) -> None:
        if self.place.superseded or self.place.step >= self.plan.steps:
            self.note("this job finished before the program was restarted: nothing is left to train")
            return
        began = f"resuming after {self.place.step} of" if self.place.step else "training"
        self.note(
            f"{began} {self.plan.steps} steps of {self.plan.per_step} of {self.plan.examples} examples, from "
            f"v{self.session.version}"
        )

    def _step(self) -> None:
        step = self.place.step
        send = partial(
            self.session.step,
            examples=[self.examples[index] for index in self.plan.at(step)],
            key=f"finetune-{self.place.id}-{step + 1}",
            settings=self.resolved.settings_at(step),
            client_state=self.place.client_state(step + 1),
        )
        try:
            status = train_once(send, self._guard)
        except Rewound:
            self._go_back()
            return
        if isinstance(status, NothingToTrain):
            self._count_empty_step(status.why)
            return
        self.last = status
        self.place.step, self.place.trained = step + 1, True
        loss = status.metrics.get("loss")
        loss_text = "" if loss is None else f" · loss {loss:.4f}"
        self.note(f"step {step + 1}/{self.plan.steps}{loss_text} · v{status.version}")

    def _count_empty_step(self, why: str) -> None:
        self.place.step += 1
        self._why_empty = why
        self.note(f"step {self.place.step}/{self.plan.steps} trained nothing: {why}")
        self._guard.empty(why, _NO_ANSWERS)

    def _go_back(self) -> None:
        status, was = self.session.settle(), self.place.step
        self.place = self.place.rewound(status.client_state, status.last_metrics)
        self.last = None
        self.note(f"the machine was lost: back from step {was} to step {self.place.step}")


def _main_thread_ended() -> bool:
    """Whether only DSPy's thread of this job keeps the program from ending: after Ctrl-C, for one."""
    return not threading.main_thread().is_alive()


def _examples(train_data: Sequence[Mapping[str, Any]], train_data_format: Any) -> list[SupervisedExample]:
    """The conversations. Raises ValueError for another form, TrainingFailed if there is none."""
    if train_data_format not in (None, TrainDataFormat.CHAT):
        raise ValueError(
            f"the policy learns from conversations (TrainDataFormat.CHAT), not {train_data_format!r}"
        )
    if not train_data:
        raise TrainingFailed(
            "There is no example to learn from",
            "no run of the program on the trainset was good by the metric",
            "look at the metric's scores on the trainset, or give a better teacher",
        )
    examples = []
    for number, it in enumerate(train_data):
        try:
            examples.append(SupervisedExample.model_validate(dict(it)))
        except ValidationError as error:
            raise ValueError(f"example {number} of the training data is no conversation: {error}") from None
    return examples
