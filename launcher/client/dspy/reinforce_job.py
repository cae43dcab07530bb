"""One `lm.reinforce(…)` of DSPy's own GRPO: its groups become steps of the run, one for each of its steps.

Neighbours: `provider.py` names it, `reinforce_groups.py` converts DSPy's groups, `grpo_job_context.py` lets
the LM's untagged answers be trained meanwhile, `job_train_kwargs.py` resolves its keywords. DSPy's loop does
not end on errors, so these errors are raised out of it: an endpoint that is away, a step that failed, a
training in which no step was taken. launcher.client.GRPO is the better loop: it trains the sampled tokens,
and resumes without sampling again. Knows nothing of programs.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import dspy
from dspy.clients.provider import ReinforceJob
from dspy.clients.utils_finetune import TrainDataFormat, TrainingStatus

from launcher.base.sanitize import plain_text as sanitized
from launcher.client.dspy import version_names, version_pinning
from launcher.client.dspy.compile_start import record_version
from launcher.client.dspy.grpo_job_context import ActiveGrpoJob
from launcher.client.dspy.job_places import begin_job
from launcher.client.dspy.job_train_kwargs import resolve_for_job
from launcher.client.dspy.reinforce_groups import GroupDeduplicator
from launcher.client.dspy.training_place import Place
from launcher.client.failures import Rewound, TrainingFailed
from launcher.client.no_progress import NoProgressGuard, NothingToTrain
from launcher.client.request_bodies import Group
from launcher.client.schema import StepStatus
from launcher.client.session import Session, connect
from launcher.client.train_kwargs import ResolvedTrainKwargs
from launcher.client.train_once import train_once

# The number of groups that are requested at first. DSPy throws away rollouts beyond the listed ids, and fills
# ids beyond its rollouts with copies, which are not sent again.
_PENDING_IDS = 256
# An optimizer remembers which ids it has served, also from one job to the next.
_ids = itertools.count(1)
_ids_lock = threading.Lock()


class SlipwayReinforceJob(ReinforceJob):
    """Trains the LM in place: after each step it asks the new version, by its name."""

    def __init__(self, lm: Any, train_kwargs: Mapping[str, Any] | None = None) -> None:
        super().__init__(lm=lm, train_kwargs=dict(train_kwargs or {}))
        self.lm: Any = lm
        self.session: Session = _session_of(lm)
        self.checkpoints: dict[str, dict[str, Any]] = {}
        self.last_checkpoint: str | None = None
        self.history: list[StepStatus] = []
        self._status = TrainingStatus.not_started
        self._deduplicator = GroupDeduplicator()
        self._pending = _new_ids(_PENDING_IDS)
        self._guard = NoProgressGuard(self.session.max_empty_steps)
        self._version: int | None = None
        self._weights: str | None = None

    # ------------------------------------------------------------- its life

    def initialize(self) -> None:
        """Begin. Raises NotImplementedError for an adapter whose answers DSPy cannot write again, ValueError
        for a temperature at which a group's rollouts are all the same, TrainingFailed for train_kwargs that
        need another run.
        """
        _check_adapter()
        # DSPy's loop does not tell its number of steps.
        self._resolved: ResolvedTrainKwargs = resolve_for_job(
            self.session, self.train_kwargs, _log, self.train_kwargs.get("max_steps")
        )
        temperature = self._temperature()
        if note := version_pinning.pin_copies_except((self.lm,), self.session):
            _log(note)
        self.place: Place = begin_job("dspy reinforce", self.train_kwargs, self.session)
        self._steps_to_skip = math.inf if self.place.superseded else self.place.step
        active = ActiveGrpoJob({"temperature": temperature})
        # An exception within DSPy's loop drops the job, and nothing else reports its end.
        self._release = weakref.finalize(self, _end_job, self.lm, active)
        self.lm.grpo_job = active
        self._use_newest(self.session.version)
        self._status = TrainingStatus.running
        _log(f"DSPy's own loop trains {self.lm.model}, sampling at temperature {temperature:g}")
        if self._steps_to_skip:
            done = "all steps" if self.place.superseded else f"{self.place.step} steps"
            _log(f"{done} were taken before the restart: DSPy samples for them again, none is trained twice")

    def terminate(self) -> None:
        """End the job. The LM now names the trained version. Raises TrainingFailed if no step was taken."""
        if self._status != TrainingStatus.running:
            return
        if not self.place.trained and not self.place.superseded:
            self._end(TrainingStatus.failed)
            raise TrainingFailed(
                "DSPy's GRPO sent no step that could be trained",
                "all rewards of each group were equal"
                if self.place.step
                else "no rollout made a group: its warnings say why",
                "score the program with dspy.Evaluate and look at its answers",
            )
        self._end(TrainingStatus.succeeded)
        name = self.place.made or version_names.pin_version(self.session, self._version or 0, self._weights)
        record_version(self.place, name, self.session)
        version_names.use_version(self.lm, name)
        _log(f"{self.place.step} steps were taken; the program now uses {self.lm.model}")

    def cancel(self) -> None:
        """End; the LM goes on asking the newest version it knows."""
        self._end(TrainingStatus.cancelled)

    def status(self) -> TrainingStatus:
        """Where it stands."""
        return self._status

    def _end(self, status: TrainingStatus) -> None:
        self._status = status
        self._release()

    @contextmanager
    def _failing_on_error(self) -> Iterator[None]:
        """DSPy's loop does not end a job that raises."""
        try:
            yield
        except BaseException:  # a Ctrl-C too: the job's hooks and its status must not stay as they were
            self._end(TrainingStatus.failed)
            raise

    # ------------------------------------------------------------- attributes for DSPy's loop

    @property
    def current_model(self) -> str:
        """The version that is asked now, by its name."""
        return self.lm.model

    def get_status(self) -> dict[str, Any]:
        """The status as DSPy's loop reads it. Asks the run, so that the loop ends with it: raises
        EndpointLost."""
        if self._status == TrainingStatus.running:
            with self._failing_on_error():
                version = self.session.version
                if version != self._version:  # the machine was lost, or another program trains
                    self._use_newest(version)
        return {
            "job_id": self.place.id,
            "status": self._status.value,
            "current_model": self.lm.model,
            "checkpoints": self.checkpoints,
            "last_checkpoint": self.last_checkpoint,
            "pending_batch_ids": list(self._pending),
        }

    def save_checkpoint(
        self, checkpoint_name: str, score: float | None = None, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Keep the version that is served now (see `Session.pin`), under a name."""
        kept = version_names.pin_version(self.session, self._version or 0, self._weights)
        self.checkpoints[checkpoint_name] = {
            "checkpoint_name": checkpoint_name,
            "model": kept,
            "global_step": self.place.step,
            "metadata": {**(metadata or {}), **({} if score is None else {"score": score})},
            "timestamp": time.time(),
        }
        self.last_checkpoint = checkpoint_name

    # ------------------------------------------------------------- a step

    def step(self, train_data: Sequence[Mapping[str, Any]], train_data_format: Any = None) -> None:
        """Train one step on all fresh groups; the LM asks the new version once it is served.

        Raises StepFailed, EndpointLost, and TrainingFailed if nothing can be trained again and again.
        """
        with self._failing_on_error():
            if train_data_format not in (None, TrainDataFormat.GRPO_CHAT):
                raise ValueError(f"a step takes TrainDataFormat.GRPO_CHAT, not {train_data_format!r}")
            groups = self._deduplicator.new_groups(train_data, f"{self.place.id}/{self._pending[0]}")
            # Without a copy among them there were perhaps more: twice as many are asked for from here on.
            more = 2 if len(groups) == len(self._pending) else 1
            self._pending = _new_ids(len(self._pending) * more)
            if self._steps_to_skip:
                self._steps_to_skip -= 1
            elif groups:
                self._train(groups)

    def _train(self, groups: Sequence[Group]) -> None:
        step = self.place.step
        send = partial(
            self.session.step,
            groups,
            settings=self._resolved.settings_at(step),
            client_state=self.place.client_state(step + 1),
        )
        try:
            status = train_once(send, self._guard)
        except Rewound:
            self._go_back()
            return
        if isinstance(status, NothingToTrain):
            self.place.step += status.was_queued
            self._count_empty_step(status)
        else:
            self.place.step, self.place.trained = step + 1, True
            self.history.append(status)
            self._use_version(status.version or 0, (status.publication or {}).get("sha256"))
            counts = status.counts
            _log(
                f"step {step + 1} · {counts.groups} groups · trained {counts.trained} of {counts.samples} · "
                f"v{status.version}"
            )

    def _count_empty_step(self, nothing: NothingToTrain) -> None:
        _log(f"a step trained nothing: {nothing.why}")
        hint = "launcher.client.GRPO trains what was sampled, whatever the adapter"
        self._guard.empty(nothing.why, hint, counts=nothing.counts)

    def _go_back(self) -> None:
        """Go back: these rollouts are lost, and DSPy's loop goes on with its next."""
        status, was = self.session.settle(), self.place.step
        self.place = self.place.rewound(status.client_state, status.last_metrics)
        self._use_newest(status.version)
        _log(f"the machine was lost: back from step {was} to step {self.place.step}; its groups are lost")

    def _use_newest(self, version: int) -> None:
        self._use_version(version, version_names.weights_hash(self.session, version) if version else None)

    def _use_version(self, version: int, weights: str | None) -> None:
        self._version, self._weights = version, weights
        name = version_names.version_name(self.session, version, weights)
        self.lm.model = version_names.with_provider_prefix(name, self.lm.model)

    def _temperature(self) -> float:
        """The temperature of its rollouts: that of train_kwargs, or the LM's."""
        temperature = self._resolved.sampling.get("temperature", self.lm.kwargs.get("temperature"))
        if temperature is None:
            return 1.0
        if not 0 < temperature <= 2:
            raise ValueError(
                f"temperature {temperature:g}: the rollouts of a group would all be the same. "
                'Give the LM another, or train_kwargs={"temperature": 1.0}'
            )
        return float(temperature)


def _new_ids(count: int) -> list[int]:
    with _ids_lock:
        return list(itertools.islice(_ids, count))


def _session_of(lm: Any) -> Session:
    session = getattr(lm, "session", None) or getattr(lm.provider, "session", None)
    return session if isinstance(session, Session) else connect()


def _end_job(lm: Any, active: ActiveGrpoJob) -> None:
    """The LM's answers are evaluations again, and its cache is as it was made."""
    active.is_over = True
    if lm.grpo_job is active:
        lm.grpo_job = None
        lm.cache = getattr(lm, "requested_cache", True)


def _check_adapter() -> None:
    adapter = dspy.settings.adapter
    if adapter is not None and (
        not isinstance(adapter, dspy.ChatAdapter) or isinstance(adapter, dspy.JSONAdapter)
    ):
        raise NotImplementedError(
            f"DSPy's GRPO cannot write the answers of {type(adapter).__name__} again, which it trains. "
            "Hint: dspy.configure(adapter=dspy.ChatAdapter()), or launcher.client.GRPO, which trains what "
            "was sampled with any adapter"
        )


def _log(text: str) -> None:
    sys.stderr.write(f"grpo: {sanitized(text)}\n")
    sys.stderr.flush()
