"""The summary of a run: its exit code, the last lines of `launch`, and the last object of `--json`.

Neighbours: `run.py` fills it in, `output.py` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.errors import EXIT_OK, JobFailed, LaunchError
from launcher.base.log import REDACTOR
from launcher.base.units import format_duration, format_money
from launcher.console.output import Output
from launcher.run.signals import Interrupted
from launcher.types.durability import DurabilityStatus
from launcher.types.machine import Proof

if TYPE_CHECKING:
    from runtime.shared.statuses import RuntimeStatus


@dataclass(frozen=True)
class Summary:
    """`status` is the runtime's last; `program_exit_code` is None if the program was ended.

    `cost` is this life's, `cost_before` the earlier lives'. `unpulled`: the reason why the newest results are
    not at home. `troubles`: the other errors of the end. `unarmed_seconds`: the longest time that its machine
    may have been without an armed timer of its own.
    """

    run_id: str
    name: str | None
    seconds: float
    cost: float
    status: RuntimeStatus | None
    results: Path | None
    proof: Proof
    reason: str | None
    exit_code: int
    program_exit_code: int | None
    durability: DurabilityStatus
    why: str | None = None
    cost_before: float = 0.0
    unpulled: str | None = None
    troubles: tuple[str, ...] = ()
    unarmed_seconds: float | None = None

    def say(self, output: Output) -> None:
        """Print it."""
        output.event(
            "end",
            self.text(),
            run_id=self.run_id,
            name=self.name,
            reason=self.reason,
            why=self.why,
            exit_code=self.exit_code,
            program_exit_code=self.program_exit_code,
            seconds=round(self.seconds, 3),
            cost=self.cost,
            cost_of_all_lives=self.cost + self.cost_before,
            step=self.status.step if self.status else None,
            empty_steps=self.status.empty_steps if self.status else None,
            version=self.status.version if self.status else None,
            results=str(self.results) if self.results else None,
            down=self.proof.to_dict(),
            unpulled=self.unpulled,
            troubles=list(self.troubles),
            unarmed_seconds=self.unarmed_seconds,
            **self.durability.to_dict(),
        )

    def text(self) -> str:
        """The lines for people."""
        label = self.name or self.run_id
        lines = [f"{label} ended after {format_duration(self.seconds)}, {self._money()}"]
        if self.status is not None:
            reward = self.status.last_metrics.get("reward")
            last = "" if reward is None else f", reward {reward:.3g}"
            empty = f" and {self.status.empty_steps} empty" if self.status.empty_steps else ""
            lines.append(f"  steps    {self.status.step}{empty}, policy version {self.status.version}{last}")
        if self.results is not None:
            lines.append(f"  results  {self.results}")
        if self.unarmed_seconds is not None:
            window = format_duration(self.unarmed_seconds)
            lines.append(f"  window   {window} from asking for the machine to its own armed timer")
        if self.unpulled is not None:
            lines.append(f"  results  the newest were NOT copied: {self.unpulled}")
        steps = (self.durability.committed, self.durability.durable)
        if self.exit_code != EXIT_OK and steps != (None, None):
            lines.append(f"  resume   launch --resume {label}")
        verdict = "verified" if self.proof.verified else "NOT VERIFIED"
        return "\n".join([*lines, f"  down: {verdict} ({self.proof.detail})"])

    def _money(self) -> str:
        cost = format_money(self.cost)
        if not self.cost_before:
            return cost
        return f"{cost} ({format_money(self.cost + self.cost_before)} since its first start)"


def exit_code_of(failure: BaseException | None) -> int:
    """The exit code for this failure; None: all went well."""
    if isinstance(failure, LaunchError | Interrupted):
        return failure.exit_code
    return EXIT_OK


def reason_of(failure: BaseException | None) -> str | None:
    """The reason of its end in one line, if it did not end by itself."""
    if isinstance(failure, Interrupted):
        return f"interrupted by {failure}"
    return failure.message if isinstance(failure, LaunchError) else None


def why_of(failure: BaseException | None) -> str | None:
    """The cause of that reason in one line, if known; it may quote a program's output."""
    why = failure.why if isinstance(failure, LaunchError) else None
    return " ".join(REDACTOR.redact(why).split()) if why else None


def program_code_of(failure: BaseException | None, command: tuple[str, ...]) -> int | None:
    """The program's own exit code; None if it did not come to its end."""
    if isinstance(failure, JobFailed):
        return failure.job_exit_code
    return 0 if failure is None and command else None
