"""Starts a run from the command line in four calls: read the request, plan, find the step to resume from,
agree.

Neighbours: `commands.py` calls it; `request_validation.py`, `pricing.py`, `resume_point.py` and
`price_agreement.py` are the four, in a row; `run.py` is the life of the run. Nothing is ended before all is
checked, and no provider is asked for a machine before its price is agreed to.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.base.home import Home
from launcher.config import memory_fit, price_agreement, pricing, request_validation
from launcher.config.request_validation import ParsedRequest
from launcher.console.output import Output
from launcher.records.records import RecordStore, RunRecord
from launcher.run import machine_from_plan, rented_run
from launcher.run.resume_point import ResumePoint, prepare_resume
from launcher.run.run import Run
from launcher.run.run_request import RunRequest
from launcher.types.machine import Machine


def launch_run(
    flags: Mapping[str, Any],
    sets: tuple[str, ...],
    env_file: Path | None,
    command: tuple[str, ...],
    output: Output,
    started_by: str | None = None,
) -> int:
    """Check, then run; returns the exit code. Raises LaunchError when nothing was started.

    The flag `resume` names a run to resume. `started_by`: see `RunRequest`.
    """
    home = Home.find()
    parsed, model_path = request_validation.read_request(flags, sets, env_file, command, home, output.note)
    settings = parsed.settings
    plan = pricing.make_priced_plan(settings, output.note)
    memory_fit.refuse_too_small(plan, settings)
    pricing.refuse_without_account(plan)
    resumed = _resume_point(parsed, home, output)
    if resumed is not None:
        plan = pricing.subtract_earlier_cost(plan, resumed.record)
    price_agreement.confirm(output, plan, settings)
    rented_run.ask_about_ssh(output, plan, home.runs, settings.yes)
    output.claim_stdout()
    for warning in settings.warnings:
        output.warn(warning)
    machine = functools.partial(
        machine_from_plan.machine_for,
        plan,
        secrets=request_validation.secret_values(settings),
        warn=output.warn,
        copy_rate=settings.copy_rate,
    )
    request = RunRequest(settings, plan, model_path, parsed.command, parsed.folder, resumed, started_by)
    return Run(request, home, output, machine).execute()


def _resume_point(parsed: ParsedRequest, home: Home, output: Output) -> ResumePoint | None:
    """Where a run is resumed from, its leftovers ended; None for a new run."""
    if parsed.earlier is None:
        return None
    store = RecordStore(home)

    def machine_of(record: RunRecord) -> Machine:
        return machine_from_plan.machine_of(record, store, home)

    return prepare_resume(store, parsed.earlier, machine_of, output.note)
