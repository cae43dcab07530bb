"""The runtime's phase and status, from the state of supervisor, engines and steps.

Neighbours: routes.py answers with it; gateway.py makes it. Reads its parts at each question, and is told
nothing.
"""

from __future__ import annotations

from typing import Literal, cast

from runtime.engine.command import max_sequences_of_programs
from runtime.gateway.engines.engine_pool import EnginePool
from runtime.gateway.samples.samples import SampleStore
from runtime.gateway.steps.queue import StepQueue
from runtime.gateway.versions.model_check import ModelCheck
from runtime.gateway.versions.versions import Versions
from runtime.shared.process_status import SupervisorStatus
from runtime.shared.runtime_config import RuntimeConfig
from runtime.shared.schema import StepSettings
from runtime.shared.statuses import RuntimeStatus

Phase = Literal["starting", "ready", "degraded", "failed", "stopping"]


class StatusReader:
    """Reads the phase and the status when they are asked for; keeps and decides nothing."""

    def __init__(
        self,
        config: RuntimeConfig,
        supervisor_status: SupervisorStatus,
        pool: EnginePool,
        versions: Versions,
        samples: SampleStore,
        model_check: ModelCheck,
    ) -> None:
        self._config = config
        self.supervisor_status = supervisor_status
        self._pool = pool
        self._versions = versions
        self._samples = samples
        self._model_check = model_check

    def phase(self, trouble: str | None, starting: bool = False) -> Phase:
        """The supervisor's word, unless the gateway knows better: an engine may be up and still lack the
        served version, and a publication may have failed. `starting`: the run's first version is to come.
        Nothing is ready before the model is admitted."""
        reported = cast(Phase, self.supervisor_status.supervisor().get("phase", "ready"))
        if reported in ("failed", "stopping"):
            return reported
        if self._model_check.refusal is not None:
            return "failed"
        starting = starting or not self._model_check.is_passed
        if not self._pool.all_ready:
            return "degraded" if self._pool.was_ready and not starting else "starting"
        if starting:
            return "starting"
        return (
            "degraded" if reported == "ready" and (trouble or self.supervisor_status.silence()) else reported
        )

    def status(self, steps: StepQueue) -> RuntimeStatus:
        """The body of `GET /slipway/status`."""
        supervisor = self.supervisor_status.supervisor().get("detail")
        words = (self._model_check.refusal, self.supervisor_status.silence(), supervisor, steps.trouble)
        return RuntimeStatus(
            run_id=self._config.run_id,
            phase=self.phase(steps.trouble, steps.starting),
            model=self._config.model_path,
            served_name=self._config.served_name,
            version=self._versions.current,
            step=self._versions.step,
            empty_steps=steps.empty,
            steps_queued=steps.queued,
            children=self.supervisor_status.children(),
            lease_left_seconds=self.supervisor_status.lease_left_seconds(),
            client_state=steps.client_state,
            last_metrics=steps.last_metrics,
            settings=self._config.train.resolved().model_dump(include=set(StepSettings.model_fields)),
            max_staleness=self._config.max_staleness,
            places=self._config.engines * max_sequences_of_programs(self._config),
            samples=self._samples.count,
            prefix_cache_hits=self._pool.prefix_cache_hits,
            admission=self._model_check.record,
            detail="; ".join(word for word in words if word) or None,
            warnings=steps.warnings.lines,
            disk=steps.disk,
        )
