"""A machine made of processes on this computer: the same calls as a rented one, no account.

Neighbours: `machine.py` defines each call, `runtime_start.py` waits for the runtime, `runtime/bootstrap.py`
builds its environment, `runtime/keeper.py` is the process started here; `local_gpus.py` chooses this
computer's GPUs if a run wants them, `results_copy.py` copies results. Every process of the run inherits
`SLIPWAY_RUN_ID`, so a process that no record names is still found. Knows nothing of the user's program, the
relay or the terminal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from launcher.backends.runtime_start import RuntimeStart, reason_of_end
from launcher.base import credentials, process_inspection, processes
from launcher.base.errors import PreflightError
from launcher.base.module_command import module_command
from launcher.base.processes import ProcessId
from launcher.records.records import RUN_VARIABLE

# All that its end needs is imported with it: an upgrade of this package in mid-run must not meet an old half.
from launcher.results import durable, results_copy, whole_checkpoints
from launcher.results.rollout_texts import not_closed
from launcher.types.machine import (
    CLOSE_WANDB_SECONDS,
    Progress,
    Proof,
    PullReport,
    Stopped,
    never_stopped,
    no_progress,
)
from runtime.shared import wandb_signals

if TYPE_CHECKING:
    from launcher.types.durability import DurabilityStatus
    from runtime.fitness import Needs
    from runtime.shared.runtime_config import RuntimeConfig

# State files of an earlier life of the run; this life must not read them as its own.
_STATE_FILES = ("keeper.json", "supervisor.json", "trainer.json")
# The runtime's orderly end: the trainer finishes its step, then gateway and engines stop.
KEEPER_SECONDS = 50.0
STRAGGLER_SECONDS = 2.0
_POLL_SECONDS = 0.05
# A socket's path must fit into 108 bytes on Linux, 104 on macOS, its name and a zero byte included.
_SOCKET_PATH_BYTES = 100
_LONGEST_SOCKET_NAME = "/engine-00.sock"
# In the folder of sockets: the run's folder, which tells whose home it belongs to.
_OWNER_FILE = "run"


class LocalMachine:
    """One run's runtime on this computer.

    `folder` becomes the runtime's state_dir; `environments` holds the built environments of all runs.
    `keep(description)` is called whenever `describe()` has changed, before anything depends on it. `secrets`
    are variables for the runtime's environment; no description holds them. `needs`: its requirements on this
    computer's GPUs, and the runtime's build; None: the CPU build.
    """

    kind = "local"
    unarmed_seconds: float | None = None

    def __init__(
        self,
        run_id: str,
        folder: Path,
        environments: Path,
        *,
        variant: str = "cpu",
        keep: Callable[[dict[str, Any]], object] = lambda description: None,
        secrets: Mapping[str, str] | None = None,
        needs: Needs | None = None,
    ) -> None:
        self._run_id = run_id
        self._folder = folder.absolute()
        self._sockets = short_folder(run_id)
        self._environments = environments
        self._variant = needs.variant if needs else variant
        self._needs = needs
        self._keep = keep
        self._secrets = secrets or {}
        self._securing = results_copy.DurableWatcher(self._folder)
        self._keeper: ProcessId | None = None
        self._python: Path | None = None

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> Self:
        """The machine that `describe` described, perhaps in another process. It can be ended and pulled."""
        machine = cls(
            description["run_id"],
            Path(description["state_dir"]),
            Path(description["environments"]),
            variant=description["variant"],
        )
        machine._sockets = Path(description["socket_dir"])
        keeper = description.get("keeper")
        machine._keeper = ProcessId(**keeper) if keeper else None
        return machine

    def describe(self) -> dict[str, Any]:
        """See launcher/types/machine.py."""
        return {
            "kind": self.kind,
            "run_id": self._run_id,
            "state_dir": self.state_dir,
            "socket_dir": self.socket_dir,
            "environments": str(self._environments),
            "variant": self._variant,
            "keeper": dataclasses.asdict(self._keeper) if self._keeper else None,
        }

    @property
    def state_dir(self) -> str:
        """See launcher/types/machine.py."""
        return str(self._folder)

    @property
    def socket_dir(self) -> str:
        """See launcher/types/machine.py."""
        return str(self._sockets)

    @property
    def device_type(self) -> str:
        """See launcher/types/machine.py."""
        return self._variant

    @property
    def price_per_hour(self) -> float:
        """See launcher/types/machine.py."""
        return 0.0

    @property
    def ephemeral(self) -> bool:
        """See launcher/types/machine.py. Its folder stays: `launch pull` and `launch --resume` find it
        there."""
        return False

    def provision(self, progress: Progress = no_progress) -> None:
        """Make the two folders, for this user alone."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._folder / "logs").mkdir(mode=0o700, exist_ok=True)
        make_own_folder(self._sockets, self._folder.parent)

    def push(self) -> None:
        """Copy the runtime's code beside the run, so that an upgrade of the package changes nothing in it."""
        import runtime

        shutil.rmtree(self._code, ignore_errors=True)
        shutil.copytree(
            Path(runtime.__file__).parent,
            self._code / "runtime",
            ignore=shutil.ignore_patterns("__pycache__", "*.safetensors", "requirements"),
            dirs_exist_ok=True,
        )

    def setup(self, progress: Progress = no_progress) -> None:
        """Build the runtime's environment, or find it built."""
        from runtime import bootstrap

        if not bootstrap.is_ready(self._environments, self._variant):
            self._environments.mkdir(parents=True, exist_ok=True)
            _check_space(self._environments, bootstrap.NEEDED_BYTES[self._variant])
        try:
            self._python = bootstrap.ensure_environment(
                self._environments, self._variant, progress=progress, environ={RUN_VARIABLE: self._run_id}
            )
        except bootstrap.BootstrapError as error:
            raise PreflightError(
                "the runtime's environment could not be built",
                str(error),
                "check the network and the disk, then run the same command again",
            ) from error

    def serve(self, config: RuntimeConfig, token: str, progress: Progress = no_progress) -> Path:
        """Start the keeper and wait for the gateway; its socket."""
        place = {"run_id": self._run_id, "state_dir": self.state_dir, "socket_dir": self.socket_dir}
        path = self._folder / "runtime.json"
        for name in _STATE_FILES:
            (self._folder / name).unlink(missing_ok=True)
        path.write_text(config.model_copy(update=place).model_dump_json(indent=1) + "\n")
        keeper = self._start_keeper(path, token)
        gateway = self._sockets / "gateway.sock"
        RuntimeStart(self._run_id, self._folder, gateway, progress).wait(
            token, keeper.poll, config.start_seconds
        )
        return gateway

    def ended(self) -> str | None:
        """The keeper is the runtime's last process: when it is gone, the runtime is."""
        if self._keeper is None or self._keeper.alive():
            return None
        return reason_of_end(self._folder)

    def close_wandb(self, seconds: float = CLOSE_WANDB_SECONDS) -> None:
        """See launcher/types/machine.py."""
        opened = self._folder / wandb_signals.OPEN
        if self._keeper is None or not self._keeper.alive() or not opened.exists():
            return
        (self._folder / wandb_signals.CLOSE).touch()
        until = time.monotonic() + seconds
        while opened.exists() and self._keeper.alive():
            if time.monotonic() > until:
                raise not_closed()
            time.sleep(_POLL_SECONDS)

    def pull(
        self, into: Path, progress: Progress = no_progress, stopped: Stopped = never_stopped
    ) -> PullReport:
        """See launcher/types/machine.py. On one disk it is done at once."""
        return results_copy.pull(self._folder, into)

    def committed(self) -> int | None:
        """See launcher/types/machine.py."""
        return whole_checkpoints.newest_whole_step(self._folder / "checkpoints")

    def make_durable(self, into: Path, stopped: Stopped = never_stopped) -> DurabilityStatus:
        """See launcher/types/machine.py. Linked if the disk can: the same bytes under a second name."""
        return self._securing.look(into)

    def upload_checkpoints(self, results: Path, progress: Progress = no_progress) -> int:
        """See launcher/types/machine.py."""
        return durable.restore(results, self._folder)

    def down(self) -> None:
        """End the keeper, which ends the runtime in order; then everything else that carries the run's id."""
        if self._keeper is not None and self._keeper.alive():
            self._keeper.send(signal.SIGTERM)
            processes.wait_for_end(self._keeper, KEEPER_SECONDS)
        processes.end(self._leftovers, STRAGGLER_SECONDS)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._sockets)

    def proof(self) -> Proof:
        """Look for the keeper, for processes with the run's id, and for its sockets."""
        left = sorted(process.pid for process in self._leftovers())
        if left:
            return Proof(False, f"processes of {self._run_id} still run: {', '.join(map(str, left))}")
        if self._sockets.exists():
            return Proof(False, f"{self._sockets} still exists")
        return Proof(True, f"no process of {self._run_id} is left, its sockets are gone")

    @property
    def _code(self) -> Path:
        """A folder with `runtime` and nothing else, so that its place on the path shadows nothing."""
        return self._folder / "code"

    def _start_keeper(self, config: Path, token: str) -> subprocess.Popen[bytes]:
        if self._python is None:
            raise RuntimeError("setup comes before serve")
        environ = credentials.runtime_environ(os.environ, self._secrets) | {
            RUN_VARIABLE: self._run_id,
            "PYTHONPATH": str(self._code),
            "PATH": f"{self._python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }
        if self._needs is not None:
            from launcher.backends import local_gpus

            environ |= local_gpus.variables(local_gpus.choose(self._needs, os.environ))
        with (self._folder / "logs" / "keeper.log").open("ab") as log:
            keeper = subprocess.Popen(
                [*module_command("runtime.keeper", self._python), "--config", str(config)],
                cwd=self._folder,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._keeper = ProcessId.of(keeper.pid)
        self._keep(self.describe())
        assert keeper.stdin is not None  # a pipe, as asked for
        with contextlib.suppress(BrokenPipeError):  # it died at once: the wait reports the reason
            keeper.stdin.write(token.encode() + b"\n")
            keeper.stdin.close()
        return keeper

    def _leftovers(self) -> set[ProcessId]:
        named = {self._keeper} if self._keeper is not None else set()
        return processes.tree(named) | process_inspection.with_variable(RUN_VARIABLE, self._run_id)


def short_folder(run_id: str) -> Path:
    """The folder for the sockets: the temporary folder, or /tmp if its path is too long for a socket."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        folder = os.path.join(parent, run_id)
        if len(os.fsencode(folder + _LONGEST_SOCKET_NAME)) <= _SOCKET_PATH_BYTES:
            return Path(folder)
    raise AssertionError("/tmp is short")


def make_own_folder(folder: Path, owner: Path) -> None:
    """Make a folder in a place where others may write; one that stands there already must be ours. `owner`:
    the folder of the run whose sockets it takes, for `launch gc` of this home and of others."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PreflightError(
                f"{folder} exists and other users can access it",
                "other users could open the run's sockets",
                f"ls -ld {folder}",
            ) from None
    with contextlib.suppress(OSError):  # a full disk: without the file `launch gc` leaves the folder alone
        (folder / _OWNER_FILE).write_text(os.path.realpath(owner), encoding="utf-8")


def owner_of(sockets: Path) -> str | None:
    """The folder of the run that has these sockets; None if it cannot be told."""
    try:
        return (sockets / _OWNER_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _check_space(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise PreflightError(
            f"the runtime's environment needs {needed_bytes / 1e9:.0f} GB of disk",
            f"{free / 1e9:.1f} GB are free at {folder}",
            "free some space, or set LAUNCH_HOME to a folder on a larger disk",
        )
