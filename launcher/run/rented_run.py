"""The extra steps of a run on a rented machine: its price is shown, and it is kept for its results.

Neighbours: `run.py` calls these at their moments, `background_copy.py` does the pulling. Knows nothing of
SkyPilot.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.backends.ssh import ssh_config
from launcher.base import clock
from launcher.base.errors import PreflightError
from launcher.base.units import format_duration, format_money
from launcher.console import consent
from launcher.console.output import Output
from launcher.records.lease import Limits
from launcher.results.background_copy import pull_with_retries
from launcher.types.machine import Machine, Progress, PullReport
from launcher.types.plan import MEMORY_SETTINGS, GpuSplit, Plan

_SSH_LINE = "ssh_include"
# Of the memory of a GPU that engine and trainer share, the engine's part where nothing was planned.
SHARED_FRACTION = 0.45


def ask_about_ssh(output: Output, plan: Plan, runs: Path, yes: bool) -> None:
    """Ask once whether plain `ssh` may find rented machines; before anything is rented, for the answer may
    take its time."""
    if plan.rented is None or yes or consent.remembered_answer(runs.parent, _SSH_LINE) is not None:
        return
    if not ssh_config.included(runs) and consent.can_prompt(output):
        output.note(
            "`launch ssh RUN` always works. Plain ssh and scp need one Include line in ~/.ssh/config,"
        )
        agreed = consent.confirm(output, "removed with the last run. Add it, now and for later runs?")
        consent.remember_answer(runs.parent, _SSH_LINE, agreed)


def announce(output: Output, machine: Machine, plan: Plan, label: str, runs: Path, yes: bool) -> float:
    """Print its place, its price per hour and the command to enter it; returns the price.

    `yes`: --yes, which also lets plain `ssh` find it unless the user has refused that before.
    """
    price = machine.price_per_hour or 0.0
    if price > plan.max_price_per_hour:
        most = format_money(plan.max_price_per_hour)
        output.warn(f"it costs {format_money(price)}/h, the plan said {most}/h at most")
    cluster_status = machine.describe()["standing"]
    answered = consent.remembered_answer(runs.parent, _SSH_LINE)
    try:
        if (yes if answered is None else answered) and ssh_config.include(runs):
            output.event("ssh", "added one Include line to ~/.ssh/config, removed with the last run")
    except PreflightError as error:  # a convenience, and the machine is paid for by now
        output.warn(f"plain ssh will not find it: {error.message} ({error.why})")
    cost = f"{format_money(price)}/h" if price else "no price"
    where = f"{cluster_status['where']} · {cluster_status['instance_type']} · {cost}"
    output.event(
        "rented", f"{where} · launch ssh {label}", where=cluster_status["where"], price_per_hour=price
    )
    return price


def keep_seconds(machine: Machine, limits: Limits, lease_seconds: float) -> float:
    """How long a machine is kept while its results are not copied: for the lease, never past deadline or
    budget, and not at all if its disk stays."""
    left = limits.left(clock.boot_seconds())
    seconds = lease_seconds if left is None else min(lease_seconds, left)
    return max(0.0, seconds) if machine.ephemeral else 0.0


def pull_while_kept(
    warn: Progress, machine: Machine, results: Path, seconds: float, label: str, given_up: Callable[[], bool]
) -> PullReport | None:
    """Keep the machine for so long at most and try again and again. None when the results did not come, or
    the user gave them up."""
    price = f"{format_money(machine.price_per_hour)}/h" if machine.price_per_hour else "no price"
    warn(
        f"the machine is kept for {format_duration(seconds)} at most to copy its results, "
        f"{price}; Ctrl-C here or launch down {label} --give-up-results gives them up"
    )
    return pull_with_retries(machine, results, seconds, given_up)


def runtime_overrides(gpus: GpuSplit) -> dict[str, Any]:
    """The runtime's settings for its GPUs, rented or not, unless the user sets them."""
    told: dict[str, Any] = {"dtype": gpus.dtype}
    told |= {"engines": gpus.infer_gpus, "train_processes": gpus.train_gpus}
    if gpus.memory is None:
        # vLLM takes nine tenths of a GPU by default, and the trainer needs the other half.
        return told | ({"engine.memory_fraction": SHARED_FRACTION} if gpus.is_one_gpu else {})
    planned = (
        gpus.memory.activation_checkpointing,
        gpus.memory.pack_tokens,
        gpus.memory.max_model_len,
        gpus.memory.engine_places,
        gpus.memory.memory_fraction,
        gpus.memory.kv_cache_gib,
    )
    return told | {
        key: value for key, value in zip(MEMORY_SETTINGS, planned, strict=True) if value is not None
    }
