"""From what was typed to a run: checked, priced, agreed to; then it lives.

Neighbours: `commands.py` calls it, `request.py` checks, `quote.py` has the price agreed to, `run.py` is the
life of the run. Starts nothing and asks no provider before all of that is done.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher import quote, rented, request, resume
from launcher.home import Home
from launcher.machines import wanted
from launcher.output import Output
from launcher.run import Run
from launcher.safety.records import RecordStore


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
            store, flags["resume"], lambda record: wanted.machine_of(record, store, home), output.note
        )
    checked = request.check(flags, sets, env_file, command, home, resumed, output.note)
    if resumed is not None:
        wanted.check_same_kind(checked.plan, resumed.record)
    quote.confirm(output, checked.plan, checked.settings)
    rented.agree_on_ssh(output, checked.plan, home.runs, checked.settings.yes)
    output.claim_stdout()
    for warning in checked.settings.warnings:
        output.warn(warning)
    for_runtime = request.secret_values(checked.settings)
    machine = functools.partial(
        wanted.machine_for,
        checked.plan,
        secrets=for_runtime,
        warn=output.warn,
        copy_rate=checked.settings.copy_rate,
    )
    return Run(checked, home, output, machine).execute()
