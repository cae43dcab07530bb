"""`launch plan` and `launch --dry-run`: a run's resources, cost and memory fit.

Neighbours: `pricing.py` makes the plan, `price_agreement.py` and `memory_table.py` have its tables,
`commands.py` calls. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.base.errors import EXIT_OK, LaunchError, UsageError
from launcher.cli import plan_verdict, step_time
from launcher.cli.plan_verdict import Verdict
from launcher.config import (
    memory_fit,
    memory_table,
    price_agreement,
    pricing,
    request_validation,
    setting_sources,
)
from launcher.console.output import Output
from launcher.types.offers import NoPricesError, plan_command
from launcher.types.plan import GpuSplit, Plan
from launcher.types.settings import Settings


def show(
    output: Output,
    flags: Mapping[str, Any],
    sets: tuple[str, ...],
    env_file: Path | None,
    *,
    refresh: bool = False,
) -> int:
    """Show the plan; with `refresh` the prices are fetched first."""
    if flags.get("resume") is not None:
        what = "--resume cannot be used with a plan"
        raise UsageError(what, "it would end the rest of that run; a plan changes nothing", "launch status")
    settings = setting_sources.load(flags, sets, env_file)
    if refresh:
        _refresh(output, settings)
    notes = list(settings.warnings)
    try:
        _show(output, settings, notes.append)
    finally:  # below the verdict, above an error
        for line in notes:
            output.note(line)
    return EXIT_OK


def _show(output: Output, settings: Settings, note: Callable[[str], None]) -> None:
    """Raises LaunchError as a run would, after the plan is shown."""
    try:
        with output.busy("making the plan") as progress:
            plan = pricing.make_priced_plan(settings, note, only_shown=True, progress=progress)
    except NoPricesError as missing:
        _show_without_prices(output, settings, missing, note)
        raise
    refused = _refusal(settings, plan.gpus)
    found = plan_verdict.judge(settings, plan.gpus, refused, _price_command(settings, plan))
    step = None if plan.rented else step_time.step_time(plan)
    data = {"verdict": found.to_dict(), "seconds_per_step": step.seconds if step else None}
    output.result(plan.to_dict() | data, _text(plan, found, step))
    if refused is not None:
        raise refused


def _price_command(settings: Settings, plan: Plan) -> str | None:
    """The command that fetches the prices a run needs; None if they are here."""
    if plan.prices_of is None:
        return None
    cloud = plan.candidates[0].infra.partition("/")[0]
    return f"{plan_command(settings, settings.gpus or '', default_infra=cloud)} --refresh"


def _refusal(settings: Settings, gpus: GpuSplit | None) -> LaunchError | None:
    """The error that a run would raise."""
    try:
        # If the memory plan is known, the hub has answered if it had to be asked for the model's config.json.
        request_validation.validate_plan(settings, asks=gpus is not None and gpus.memory is not None)
        if gpus is not None:
            memory_fit.refuse_gpus(settings, gpus)
    except LaunchError as refused:
        return refused
    return None


def _show_without_prices(
    output: Output, settings: Settings, missing: LaunchError, note: Callable[[str], None]
) -> None:
    """Show the model's memory. Anything that a run would refuse is reported before the missing prices."""
    gpus = pricing.plan_gpus_without_prices(settings, note)
    refused = _refusal(settings, gpus)
    found = plan_verdict.judge(settings, gpus, refused, missing.hint)
    memory = [memory_table.text(gpus.memory)] if gpus.memory else []
    first = found.line(f"{settings.model} on {gpus.gpus}, prices not known")
    data = {"model": settings.model, "rented": asdict(gpus), "verdict": found.to_dict()}
    output.result(data, "\n".join([first, *price_agreement.gpu_usage(gpus), *memory]))
    if refused is not None:
        raise refused


def _text(plan: Plan, found: Verdict, step: step_time.StepTime | None) -> str:
    if plan.rented:
        first, below = plan.describe_cost(), [price_agreement.table(plan)]
    else:
        first = f"{plan.describe()}; nothing is rented"
        below = [*(price_agreement.gpu_usage(plan.own) if plan.own else [])]
        below.append(step_time.step_line(plan, step))
    memory = [memory_table.text(plan.gpus.memory)] if plan.gpus and plan.gpus.memory else []
    return "\n".join([found.line(first), *below, *memory])


def _refresh(output: Output, settings: Settings) -> None:
    from launcher.backends.skypilot import prices

    if not settings.rented:
        raise UsageError(
            f"--refresh needs {'rented GPUs' if settings.own_gpus else '--gpus'}",
            "a run on this computer has no price",
            "launch plan --gpus H100:4 --refresh",
        )
    output.note("fetching SkyPilot's price catalogs")
    for file in prices.refresh(prices.places(tuple(settings.infra))):
        output.note(f"{file} is your own, so launch does not change it")
