"""A machine rented through SkyPilot: its timer is armed first, and its provider confirms its end.

Neighbours: `machine.py` defines each call; `sky_home.py` is SkyPilot's private home, `sky_process.py`
its bounded calls; `remote_machine.py` is the machine by ssh, `link.py` the way to the runtime;
`cluster_teardown.py` its end. `teardown/guardian.py` ends it from its description.
Knows nothing of prices, programs or the terminal.

    arm     an empty launch: provisioned, and autodown armed and read back; until then see `boot_timer.py`
    push    the runtime's code, by rsync; never a second launch, which would re-arm autodown differently
    setup   the runtime's environment; serve: its keeper and the link to its gateway (`remote_job.py`)
    down    by name, also in mid-launch; proven by the provider's list of the cluster's machines
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from launcher.backends.local_machine import make_own_folder, short_folder
from launcher.backends.machine_presence import MachinePresence
from launcher.backends.runtime_start import RuntimeStart, last_lines, reason_of_end
from launcher.backends.skypilot import boot_timer, orphaned_machines, sky_cache
from launcher.backends.skypilot.cluster_request import ClusterRequest
from launcher.backends.skypilot.cluster_teardown import ClusterTeardown
from launcher.backends.skypilot.provision import Provisioning
from launcher.backends.skypilot.sky_home import SkyHome
from launcher.backends.skypilot.sky_process import SkyProcess
from launcher.backends.ssh import machine_scripts, model_upload, ssh_config
from launcher.backends.ssh.link import Link, SshHost
from launcher.backends.ssh.remote_folder import RemoteFolder
from launcher.backends.ssh.remote_job import RemoteJob
from launcher.backends.ssh.remote_machine import RemoteMachine
from launcher.backends.ssh.remote_results import RemoteResults
from launcher.base import clock
from launcher.base.errors import LaunchError, PreflightError, described
from launcher.base.failpoints import failpoint
from launcher.base.inhibit_sleep import inhibit_sleep
from launcher.base.log import LOGGER
from launcher.records.lease import NO_LIMITS, Limits
from launcher.results.rollout_texts import not_closed

# All that its end needs is imported with it: an upgrade of this package in mid-run must not meet an old half.
from launcher.types.durability import DurabilityStatus
from launcher.types.machine import (
    CLOSE_WANDB_SECONDS,
    Progress,
    Proof,
    PullReport,
    Stopped,
    never_stopped,
    no_progress,
)
from runtime.fitness import Needs

if TYPE_CHECKING:
    from launcher.backends.skypilot.standby_home import StandbyHome
    from runtime.shared.runtime_config import RuntimeConfig

SETUP_SECONDS = 3600.0
_SOCKET_NAME = "gateway.sock"
_PLAIN = ("infra", "gpus", "idle_minutes", "disk_gb", "variant")  # of a description, as they are


class CloudMachine:
    """One run's cluster. Its name is the run's id. `folder` is the run's own; `infra`: the places where it
    may be.

    `variant` is the runtime's build there, "cuda"; "cpu" is for machines of tests. `needs`: further
    requirements beside these GPUs. `model`: a folder of the user's own, uploaded to the machine. `secrets`
    are variables for the runtime's environment, `variables` for that and the set-up; no description holds
    them. `alias`: another name for plain ssh. `copy_rate`: as `copy_rate.py` takes it. `limits` are times on
    the wall clock; after them the machine's timer is not reset any more. `warn` gets messages for the user
    about a run that goes on. `keep(description)` is called whenever `describe()` has changed, before anything
    depends on it.
    """

    kind = "cloud"

    def __init__(
        self,
        run_id: str,
        folder: Path,
        *,
        infra: list[str],
        gpus: str,
        idle_minutes: int,
        disk_gb: int | None = None,
        max_price_per_hour: float | None = None,
        variant: str = "cuda",
        needs: Needs | None = None,
        model: Path | None = None,
        keep: Callable[[dict[str, Any]], object] = lambda description: None,
        secrets: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        alias: str | None = None,
        copy_rate: float | None = None,
        limits: Limits = NO_LIMITS,
        warn: Progress = no_progress,
    ) -> None:
        self._run_id = run_id
        self._folder = folder.absolute()
        self._order = ClusterRequest(
            cluster=run_id, infra=infra, gpus=gpus, disk_gb=disk_gb, idle_minutes=idle_minutes,
            max_price_per_hour=max_price_per_hour,
        )  # fmt: skip
        self._variant = variant
        self._needs = needs
        self._model = model
        self._keep = keep
        self._secrets = secrets or {}
        self._variables = variables or {}
        self._alias = alias
        self._limits = limits
        self._warn = warn
        self._link: Link | None = None
        # Where a provider may have been asked for a machine: from then on only its own list is a proof.
        self._tried: list[str] = []
        self._provision_started_at: float | None = None
        # How long the machine depended on this computer alone, at most.
        self.unarmed_seconds: float | None = None
        # The cluster's last entry in SkyPilot's books; it tells how to ask the provider afterwards.
        self._cluster_status: dict[str, Any] | None = None
        self._home = SkyHome(self._folder / "skypilot", infra, run_id.removeprefix("slip-"))
        self._sky = SkyProcess(self._home, self._folder / "skypilot.log")
        self._teardown = ClusterTeardown(
            self._order, lambda: self._tried, self._home, self._sky, self._keep_cluster_status
        )
        self._presence = MachinePresence(run_id, lambda: self._teardown.listed(self._cluster_status))
        gateway_socket = short_folder(run_id) / _SOCKET_NAME
        there = self._there = RemoteMachine(run_id, self._folder, lambda: self._cluster_status)
        where = (run_id, there.seen, there.run_folder, self._presence.is_gone, gateway_socket)
        self._results = RemoteResults(*where, self._within_limits, copy_rate)

    @classmethod
    def from_description(cls, description: dict[str, Any], standby: StandbyHome | None = None) -> Self:
        """The machine that `describe` described, perhaps in another process. It can be ended and pulled;
        `standby` asks its provider when nothing else here can."""
        plain = {name: description[name] for name in _PLAIN}
        machine = cls(description["run_id"], Path(description["folder"]), **plain)
        machine._limits = Limits(**description.get("limits", {"begun_at": 0.0}))  # older versions had none
        machine._cluster_status = description["standing"]
        machine._order.labels.update(description.get("labels", {}))
        machine._order.unsure.extend(description.get("unsure", []))  # older versions did not know
        machine._order.accounts.update(description.get("accounts", {}))
        machine.unarmed_seconds = description.get("unarmed_seconds")
        # Older versions recorded that a provider was asked, without the place.
        machine._tried = description.get("tried") or (plain["infra"] if description["asked"] else [])
        machine._teardown.standby = standby
        return machine

    def describe(self) -> dict[str, Any]:
        """See launcher/types/machine.py."""
        return {
            "kind": self.kind,
            "run_id": self._run_id,
            "folder": str(self._folder),
            "limits": asdict(self._limits),
            **self._order.description(),
            "variant": self._variant,
            "asked": bool(self._tried),
            "tried": self._tried,
            "unarmed_seconds": self.unarmed_seconds,
            "standing": self._cluster_status,
        }

    @property
    def price_per_hour(self) -> float | None:
        """The cluster's price, by SkyPilot's catalog; None before it is armed."""
        return None if self._cluster_status is None else self._cluster_status["price_per_hour"]

    @property
    def ephemeral(self) -> bool:
        """See launcher/types/machine.py."""
        return True

    @property
    def host(self) -> SshHost:
        """Its ssh host, once armed."""
        return self._there.host

    @property
    def state_dir(self) -> str:
        """See launcher/types/machine.py. Known once armed: it is below the home of the machine's user."""
        return self._there.state_dir

    @property
    def socket_dir(self) -> str:
        """See launcher/types/machine.py."""
        return f"/tmp/{self._run_id}"

    @property
    def device_type(self) -> str:
        """See launcher/types/machine.py."""
        return self._variant

    # -------------------------------------------------------------- up

    def provision(self, progress: Progress = no_progress) -> None:
        """Provision, with autodown armed. Raises PreflightError, CapacityError; leaves nothing behind
        then."""
        self._there.forget()  # an earlier life's
        self._order.labels[orphaned_machines.LABEL] = orphaned_machines.home_label(self._folder.parent)
        provisioning = Provisioning(self._order, self._home, self._sky, self._trying, self._warn, progress)
        with inhibit_sleep("a machine is being rented"):
            self._cluster_status = provisioning.run()
            failpoint("cloud.launched")
            self._keep(self.describe())
            boot_timer.cancel(self.host, self._cluster_status["where"])
        if self._provision_started_at is not None:
            self.unarmed_seconds = clock.boot_seconds() - self._provision_started_at
        self._keep(self.describe())
        sky_cache.save(self._home.folder, Path.home())
        ssh_config.write(self._folder, self.host, [self._run_id, *([self._alias] if self._alias else [])])
        self._there.run_folder().make(self.socket_dir)
        # SkyPilot's server is asked nothing any more: the end needs none (`cluster_teardown.py`).
        self._tidy_up("ending SkyPilot's server", self._sky.pause_server)

    def _trying(self, places: list[str]) -> None:
        self._tried = list(places)
        self._provision_started_at = clock.boot_seconds()
        self._keep(self.describe())

    def push(self) -> None:
        """Bring the runtime's code there: a folder with `runtime` and nothing else."""
        import runtime

        package, without = Path(runtime.__file__).parent, shutil.ignore_patterns("__pycache__")
        with tempfile.TemporaryDirectory(prefix="slipway-push-") as staging:
            shutil.copytree(package, Path(staging) / "runtime", ignore=without)
            self._there.code().send(Path(staging))
        failpoint("cloud.pushed")

    def setup(self, progress: Progress = no_progress) -> None:
        """See launcher/types/machine.py. An image that has the environment needs no build. A model is
        uploaded after the checks of the machine have passed."""
        needs = self._needs or Needs(self._variant, self._order.gpus)
        script = machine_scripts.setup(self.state_dir, needs)
        given = machine_scripts.variables_text(self._variables)
        self.run_script("setup", script, SETUP_SECONDS, progress, given)
        if self._model is not None:
            models = RemoteFolder(self.host, self._there.model_path(str(self._model)), self._folder)
            model_upload.upload(models, self._model, progress, self._presence.raise_if_gone)
        failpoint("cloud.prepared")

    def run_script(
        self,
        name: str,
        script: str,
        bound_seconds: float,
        progress: Progress = no_progress,
        stdin: bytes = b"",
    ) -> None:
        """A script on the machine, to its end. Raises JobFailed with its last line."""
        job = RemoteJob(self._there.run_folder(), name)
        job.start(script, bound_seconds, stdin)
        job.wait(bound_seconds, progress, self._presence.raise_if_gone)

    def serve(self, config: RuntimeConfig, token: str, progress: Progress = no_progress) -> Path:
        """Start the keeper, wait for the gateway through the link; the link's socket here."""
        remote = self._there.run_folder()
        place = {"run_id": self._run_id, "state_dir": self.state_dir, "socket_dir": self.socket_dir}
        place["model_path"] = self._there.model_path(config.model_path)
        remote.write("runtime.json", config.model_copy(update=place).model_dump_json(indent=1).encode())
        given = machine_scripts.stdin_text(token, self._secrets, self._variables)
        RemoteJob(remote, "serve").start(machine_scripts.serve(self.state_dir), stdin=given)
        failpoint("cloud.serving")
        sockets = short_folder(self._run_id)
        make_own_folder(sockets, self._folder)
        gateway = sockets / _SOCKET_NAME
        link = self._link = Link(self.host, gateway, f"{self.socket_dir}/{_SOCKET_NAME}")
        link.start()

        def keeper_code() -> int | None:
            try:
                remote.refresh()
            except PreflightError:  # another machine answers there
                raise
            except LaunchError as error:  # the runtime starts without us
                self._presence.raise_if_gone()
                progress(f"{error.message}: {error.why}")
            return remote.exit_code()

        RuntimeStart(self._run_id, remote.here, gateway, progress).wait(
            token, keeper_code, config.start_seconds
        )
        for line in last_lines(remote.here / "logs" / "serve.log"):
            self._warn(line)
        self._results.token = token
        return gateway

    def ended(self) -> str | None:
        """See launcher/types/machine.py. Raises JobFailed when the machine itself is gone, PreflightError
        when another one answers in its place."""
        if self._link is not None and self._link.failure is not None:
            raise self._link.failure
        remote = self._there.run_folder()
        try:
            remote.refresh()
        except LaunchError:  # a machine that cannot be reached may well be running
            self._presence.raise_if_gone()
            return None
        return None if remote.exit_code() is None else reason_of_end(remote.here)

    # -------------------------------------------------------------- results

    def close_wandb(self, seconds: float = CLOSE_WANDB_SECONDS) -> None:
        """See launcher/types/machine.py."""
        script = machine_scripts.close_wandb(self.state_dir, seconds)
        try:
            self._there.run_folder().shell(script, "end its W&B run", bound_seconds=2 * seconds)
        except LaunchError as error:
            raise not_closed(error.why) from error

    def pull(
        self, into: Path, progress: Progress = no_progress, stopped: Stopped = never_stopped
    ) -> PullReport:
        """See launcher/types/machine.py."""
        return self._results.pull(into, progress, stopped)

    def committed(self) -> int | None:
        """See launcher/types/machine.py. As seen last; None for a machine that is gone."""
        return self._results.newest_copied_step() if self._home.folder.exists() else None

    def make_durable(self, into: Path, stopped: Stopped = never_stopped) -> DurabilityStatus:
        """See launcher/types/machine.py."""
        return self._results.make_durable(into, stopped)

    def upload_checkpoints(self, results: Path, progress: Progress = no_progress) -> int:
        """See launcher/types/machine.py."""
        return self._results.upload_checkpoints(results, progress, self._presence.raise_if_gone)

    def _within_limits(self) -> bool:
        """Whether no time limit and no budget is reached yet."""
        limits = replace(self._limits, price_per_hour=self.price_per_hour or 0.0)
        return limits.reached(limits.wall_time()) is None

    # -------------------------------------------------------------- down

    def down(self) -> None:
        """See launcher/types/machine.py. Also ends a launch that is in progress."""
        try:
            if self._link is not None:
                self._link.close()
            shutil.rmtree(short_folder(self._run_id), ignore_errors=True)
        finally:
            if self._tried:
                self._teardown.down(self._cluster_status)

    def proof(self) -> Proof:
        """See launcher/types/machine.py: `cluster_teardown.py` asks the provider."""
        if not self._tried:
            self._tidy_up("removing SkyPilot's home", self._home.remove)
            return Proof(True, "no provider had been asked for anything")
        proof = self._teardown.proof(self._cluster_status)
        if proof.verified:
            self._tidy_up("forgetting its name for plain ssh", lambda: ssh_config.forget(self._folder))
        return proof

    def _tidy_up(self, what: str, act: Callable[[], None]) -> None:
        """Run a cleanup whose failure must not undo a success: a machine that is up, or a proof."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - nothing of it is paid for
            LOGGER.warning("%s: %s failed: %s", self._run_id, what, described(error))

    def _keep_cluster_status(self, cluster_status: dict[str, Any]) -> None:
        self._cluster_status = cluster_status
        self._keep(self.describe())
