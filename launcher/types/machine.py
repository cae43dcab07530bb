"""The Machine protocol: it starts a runtime, shows progress, brings results home and proves its own end.

Neighbours: `run.py` drives these calls in order, `local_machine.py` is a machine made of processes on this
computer; `teardown/guardian.py` calls `down` and `proof` when the launcher is gone.
Knows nothing of prices, programs or the terminal.

    provision → push → setup → serve → (work) → pull → down → proof
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # pydantic costs 0.25 s, the guardian must start at once
    from launcher.types.durability import DurabilityStatus
    from runtime.shared.runtime_config import RuntimeConfig

# A machine's own timer looks once a minute, and the provider takes a while to end it.
TIMER_SECONDS = 90.0
# One line of progress, for the terminal and the log.
Progress = Callable[[str], None]


# Whether the work in progress is not wanted any more.
Stopped = Callable[[], bool]


# A trainer in mid-step ends wandb's run after the step; it is not waited for.
CLOSE_WANDB_SECONDS = 15.0


def no_progress(line: str) -> None:
    """A Progress that ignores its lines."""


def never_stopped() -> bool:
    """A Stopped that never stops."""
    return False


@dataclass(frozen=True)
class PullReport:
    """The downloaded files. `skipped` names incomplete files, each with its reason; `lost` is why the
    newest results can no longer be downloaded."""

    into: Path
    files: int
    bytes: int
    seconds: float
    step: int | None
    skipped: tuple[str, ...] = ()
    lost: str | None = None

    @property
    def missing(self) -> list[str]:
        """All that did not come, a line each."""
        return [*self.skipped, *([] if self.lost is None else [self.lost])]


@dataclass(frozen=True)
class Proof:
    """The proof, or the lack of one, that nothing of the machine is left. Silence is never success.

    `hint`: a command that proves more, if repeating the same command does not.
    """

    verified: bool
    detail: str
    hint: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class Machine(Protocol):
    """One place a runtime runs, for the length of one run. All waits inside are bounded.

    Before `provision` nothing exists; `describe()` is complete from the start, so that the record holds
    everything `down` needs before anything is created. `state_dir` and `socket_dir` are paths *there*,
    for the RuntimeConfig.
    """

    @property
    def kind(self) -> str:
        """The key under which `machine_from_record` finds the class."""
        ...

    @property
    def state_dir(self) -> str:
        """The folder of the run's state on the machine."""
        ...

    @property
    def socket_dir(self) -> str:
        """The folder (0700, a short path) of the runtime's sockets on the machine."""
        ...

    @property
    def device_type(self) -> str:
        """The device that the runtime computes on: "cpu" or "cuda"."""
        ...

    @property
    def price_per_hour(self) -> float | None:
        """Its price in US dollars per hour, by the provider's list; None before it is known."""
        ...

    @property
    def unarmed_seconds(self) -> float | None:
        """How long it had no armed timer of its own, at most; None for one that needs none."""
        ...

    @property
    def ephemeral(self) -> bool:
        """Whether its disk goes when it is taken down, with everything that was not copied."""
        ...

    def provision(self, progress: Progress = no_progress) -> None:
        """Make the place. Raises PreflightError, CapacityError."""
        ...

    def push(self) -> None:
        """Bring the runtime's code and the model there."""
        ...

    def setup(self, progress: Progress = no_progress) -> None:
        """Build the runtime's environment there. Raises PreflightError, JobFailed."""
        ...

    def serve(self, config: RuntimeConfig, token: str, progress: Progress = no_progress) -> Path:
        """Start the runtime and wait until it is ready. Returns a Unix socket on this computer that answers
        HTTP.

        Raises JobFailed with the last lines of the failed process's log.
        """
        ...

    def ended(self) -> str | None:
        """The reason the runtime ended by itself; None while it runs, or if that is unknown.

        Raises JobFailed when the machine itself is gone.
        """
        ...

    def close_wandb(self, seconds: float = CLOSE_WANDB_SECONDS) -> None:
        """Before the last pull: have the trainer end its Weights & Biases run, if it has one, because
        buffered data is written only then. Waits for at most `seconds`. Raises NotPulled if it is not
        ended."""
        ...

    def pull(
        self, into: Path, progress: Progress = no_progress, stopped: Stopped = never_stopped
    ) -> PullReport:
        """Bring the results home, whole files only: as long as it moves, or until `stopped`.

        Raises NotPulled.
        """
        ...

    def committed(self) -> int | None:
        """The newest step whose files are all complete on the machine; None if there is none."""
        ...

    def make_durable(self, into: Path, stopped: Stopped = never_stopped) -> DurabilityStatus:
        """Copy the committed step, complete, to this computer. Called often, so cheap when there is nothing
        to do. A copy in progress is aborted when it is `stopped`.

        Raises NotPulled.
        """
        ...

    def upload_checkpoints(self, results: Path, progress: Progress = no_progress) -> int:
        """Send the run's checkpoints from this computer to a machine without its state, after `push`. Returns
        the last durable step, where the run begins there.

        Raises PreflightError, JobFailed.
        """
        ...

    def down(self) -> None:
        """End everything; may be called repeatedly, by any process. Never raises for a part that is
        already gone."""
        ...

    def proof(self) -> Proof:
        """Check that nothing is left."""
        ...

    def describe(self) -> dict[str, Any]:
        """All that another process needs to take this machine down, as JSON."""
        ...
