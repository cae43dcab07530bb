"""The results of a rented machine: brought home at its end, made durable while it lives. For a resume they
are sent from here to the new machine.

Neighbours: `cloud_machine.py` is the machine, `results_download.py` copies to the run's folder here, from
where `results_copy.py` and `durable.py` take them as from a local run; `timer_reset.py` keeps the machine
alive meanwhile. Knows nothing of how a machine starts and ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from launcher.backends.ssh import checkpoint_upload
from launcher.backends.ssh.copy_rate import CopyRate
from launcher.backends.ssh.remote_folder import RemoteFolder
from launcher.backends.ssh.results_download import ResultsDownload
from launcher.backends.ssh.timer_reset import resetting_timer
from launcher.base.errors import LaunchError, NotPulled
from launcher.base.unix_http import get_json

# All that its end needs is imported with it: an upgrade of this package in mid-run must not meet an old half.
from launcher.results import durable, results_copy, whole_checkpoints
from launcher.types.durability import DurabilityStatus
from launcher.types.machine import Progress, PullReport, Stopped

# Asking the runtime for its step takes milliseconds, copying starts a process on each side.
_POLL_SECONDS = 0.5
# Of a machine that is lost in mid-run the logs are here up to then.
_LOGS_EVERY_SECONDS = 60.0


class RemoteResults:
    """The results of one run. `here`: the copy of its folder on this computer. `remote`: the folder itself.
    `gone`: whether the machine is gone. `gateway_socket`: the gateway's socket on this computer, and `token`
    its token, once served. `within_limits`: whether the run's limits let the machine stay.
    """

    def __init__(
        self,
        run_id: str,
        here: Path,
        remote: Callable[[], RemoteFolder],
        gone: Callable[[], bool],
        gateway_socket: Path,
        within_limits: Callable[[], bool],
        copy_rate: float | None,
    ) -> None:
        self._run_id = run_id
        self._here = here
        self._remote = remote
        self._gone = gone
        self._gateway_socket = gateway_socket
        self._within_limits = within_limits
        self._copy_rate = CopyRate(copy_rate)
        self._looked_at = self._logs_at = float("-inf")
        self._seen = DurabilityStatus()
        self.token: str | None = None

    def pull(self, into: Path, progress: Progress, stopped: Stopped) -> PullReport:
        """See launcher/types/machine.py. Results go first to the run's folder here, then home as from a run
        on this computer. Of a machine that is gone, the copy here is used. Meanwhile the machine does not end
        itself, even if nothing else of the run is alive.
        """

        def bring(remote: RemoteFolder) -> None:
            with resetting_timer(remote.reset_timer, self._within_limits):
                ResultsDownload(remote, progress, stopped).run()

        try:
            self._fetch(bring)
            return results_copy.pull(self._here, into)
        except NotPulled:
            if not self._gone():
                raise
        report = results_copy.pull(self._here, into, last=True)
        since = "all its results" if report.step is None else f"everything after step {report.step}"
        return replace(report, lost=f"the machine is gone, with {since}")

    def upload_checkpoints(
        self, results: Path, progress: Progress, on_disconnect: Callable[[], object]
    ) -> int:
        """Send the checkpoints at home to the new machine of a resumed run; see launcher/types/machine.py.
        Meanwhile the machine does not end itself: no runtime is there to keep it."""
        remote = self._remote()
        with resetting_timer(remote.reset_timer, self._within_limits):
            return checkpoint_upload.upload(
                remote, durable.checkpoints_to_upload(results), progress, on_disconnect
            )

    def newest_copied_step(self) -> int | None:
        """The newest whole step, as it was seen last."""
        return whole_checkpoints.newest_whole_step(self._here / "checkpoints")

    def make_durable(self, into: Path, stopped: Stopped) -> DurabilityStatus:
        """See launcher/types/machine.py. The runtime is asked for its step through the link; a new one is
        copied beside the link, no faster than leaves the line to the rollouts."""
        if time.monotonic() - self._looked_at < _POLL_SECONDS:
            return self._seen
        self._looked_at = time.monotonic()
        step = self._remote_step()
        if step is None or step > (self._seen.durable or 0):
            self._fetch(lambda remote: self._rate_limited_copy(remote, into, stopped).run())
            self._seen = results_copy.make_durable(self._here, into)
        # The step that is committed there now, not the one from when the copy began.
        committed = max(
            (found for found in (self._remote_step(), self._seen.committed) if found), default=None
        )
        self._seen = replace(self._seen, committed=committed)
        return self._seen

    def _remote_step(self) -> int | None:
        """The runtime's newest step; None when it does not answer, or has none."""
        try:
            status, body = get_json(self._gateway_socket, "/slipway/status", self.token)
        except OSError:
            return None
        return int(body["step"]) if status == 200 and isinstance(body, dict) else None

    def _rate_limited_copy(self, remote: RemoteFolder, into: Path, stopped: Stopped) -> ResultsDownload:
        """A copy of a live run, at a limited rate: the weights at once, the logs now and then."""
        logs = time.monotonic() - self._logs_at > _LOGS_EVERY_SECONDS
        self._logs_at = time.monotonic() if logs else self._logs_at
        return ResultsDownload(
            remote,
            stopped=stopped,
            copy_rate=self._copy_rate,
            weights_home=lambda: results_copy.copy_newest_adapter(self._here, into),
            logs=logs,
        )

    def _fetch(self, bring: Callable[[RemoteFolder], object]) -> None:
        """The machine's results, copied to the run's folder. Raises NotPulled."""
        try:
            bring(self._remote())
        except LaunchError as error:
            raise NotPulled(
                f"the results of {self._run_id} are still on the machine", error.why, error.hint
            ) from error
