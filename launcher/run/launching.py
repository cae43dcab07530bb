"""From what was typed to a run: checked, priced, agreed to; then it lives.

Neighbours: `commands.py` calls it, `request.py` checks, `quote.py` has the price agreed to, `run.py` is the
life of the run. Starts nothing and asks no provider before all of that is done.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.asking import quote, request
from launcher.base.home import Home
from launcher.ledger.records import RecordStore
from launcher.run import machine_from_plan, rented_run, resume
from launcher.run.run import Run
from launcher.screen.output import Output


def launch_run(
    flags: Mapping[str, Any],
    sets: tuple[str, ...],
    env_file: Path | None,
    command: tuple[str, ...],
    output: Output,
) -> int:
    """Check, then run; the exit code. Raises LaunchError when nothing was started.

    The flag `resume` names a run that is to be taken up.
    """
    home = Home.find()
    resumed = None
    if flags.get("resume") is not None:
        store = RecordStore(home)
        resumed = resume.find(
            store,
            flags["resume"],
            lambda record: machine_from_plan.machine_of(record, store, home),
            output.note,
        )
    checked = request.check(flags, sets, env_file, command, home, resumed, output.note)
    if resumed is not None:
        machine_from_plan.check_same_kind(checked.plan, resumed.record)
    quote.confirm(output, checked.plan, checked.settings)
    rented_run.agree_on_ssh(output, checked.plan, home.runs, checked.settings.yes)
    output.claim_stdout()
    for warning in checked.settings.warnings:
        output.warn(warning)
    for_runtime = request.secret_values(checked.settings)
    machine = functools.partial(
        machine_from_plan.machine_for,
        checked.plan,
        secrets=for_runtime,
        warn=output.warn,
        copy_rate=checked.settings.copy_rate,
    )
    return Run(checked, home, output, machine).execute()
